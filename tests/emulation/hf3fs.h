/* An emulation of libhf3fs_api_shared.so, for tests: what kvferry calls of it, over an ordinary
 * folder. A folder with `3fs-virt/iovs` in it is a mount. The part of the daemon is played by one
 * thread for each ring: like the daemon it finds memory by the links in that folder, maps it by
 * itself, and answers with the same errors. It aborts on what the real library lets pass and
 * punishes later. */
#ifndef KVFERRY_EMULATED_HF3FS_H
#define KVFERRY_EMULATED_HF3FS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct hf3fs_iov {
  uint8_t *base;
  void *iovh;
  char id[16];
  char mount_point[256];
  size_t size;
  size_t block_size;
  int numa;
};

struct hf3fs_ior {
  struct hf3fs_iov iov;
  void *iorh;
  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

struct hf3fs_cqe {
  int32_t index;
  int32_t reserved;
  int64_t result;
  const void *userdata;
};

enum { FORBID_READ_HOLES = 2 };

/* Chances are 0 to 1, of each I/O. Set by hf3fs_emulation_configure, or HF3FS_EMULATION when the
 * library is loaded: "seed=7,eio=0.1". */
struct settings {
  double seed, chunk;
  double eio, enospc, eremoteio, eintr; /* the I/O fails */
  double lost;                          /* it happens, and its completion never comes */
  double late, late_ms;                 /* its completion comes so much later */
  double delay_us;                      /* each takes up to this */
  double reorder;                       /* 1: any prepared I/O may be next */
  double fewer;                         /* 1: waits return some of what is ready */
  double again;                         /* the next wait returns it once more */
  double foreign;                       /* one of no I/O comes before it */
  double deaf;                          /* errno of wait_for_ios */
  double implicit;                      /* begins before submit */
  double daemon_uid, blind;             /* blind: the daemon has another /dev/shm */
  double refuse_rings, refuse_files;    /* errno of iorcreate4 and reg_fd */
};

struct counters {
  uint64_t reads, writes, partial_chunk_writes, batches;
  uint64_t eio, enospc, eremoteio, eintr, lost, late, dropped, holes, zeros, implicit, fewer;
  uint64_t again, foreign, deaf;
  uint64_t rings, files; /* now */
};

extern struct settings settings;
extern struct counters counters;

double chance(void);          /* 0 to 1, of the seed */
bool happens(double rate);
void count(uint64_t *counter);
int mount_of(char *out, int size, const char *path);

/* What the daemon does with one I/O; -errno or bytes. `file`: its own descriptor. */
int64_t serve(const char *mount, const char id[16], bool is_read, size_t iov_offset, int file,
              off_t offset, size_t length, uint64_t flags);

/* A descriptor for the daemon, which is the caller's; -EBADF if `fd` was not registered. */
int registered_file(int fd);

#define MUST(condition, words)                                                   \
  do {                                                                           \
    if (!(condition)) {                                                          \
      fprintf(stderr, "emulated hf3fs: %s: %s\n", __func__, words);              \
      abort();                                                                   \
    }                                                                            \
  } while (0)

#endif
