/* The part of the daemon: memory by its link, files by their registration, reads and writes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hf3fs.h"

enum { FILES_MAX = 65536, MAPPINGS_MAX = 256, RANGES_MAX = 1000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int daemon_file[FILES_MAX]; /* by registered number: the library's dup + 1, or 0 */

static struct mapping {
  char link[PATH_MAX], target[PATH_MAX];
  uint8_t *base;
  size_t size;
  int users;
} mappings[MAPPINGS_MAX];

static bool is_same_file(int a, int b) {
  struct stat first, second;
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_ino == second.st_ino &&
         first.st_dev == second.st_dev;
}

int hf3fs_reg_fd(int fd, uint64_t flags) {
  (void)flags;
  bool hf3fs_is_hf3fs(int);
  if (settings.refuse_files > 0) return (int)settings.refuse_files;
  if (fd < 0 || fd >= FILES_MAX || !hf3fs_is_hf3fs(fd)) return EBADF;
  pthread_mutex_lock(&lock);
  int result = 0;
  if (daemon_file[fd] != 0) {
    MUST(is_same_file(fd, daemon_file[fd] - 1), "a file was closed and not deregistered");
    result = EINVAL;
  } else {
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    result = own < 0 ? errno : -own;
    if (own >= 0) daemon_file[fd] = own + 1;
    if (own >= 0) count(&counters.files);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

void hf3fs_dereg_fd(int fd) {
  pthread_mutex_lock(&lock);
  MUST(fd >= 0 && fd < FILES_MAX && daemon_file[fd] != 0, "the file is not registered");
  MUST(is_same_file(fd, daemon_file[fd] - 1), "closed before it was deregistered");
  close(daemon_file[fd] - 1);
  daemon_file[fd] = 0;
  __atomic_sub_fetch(&counters.files, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&lock);
}

int registered_file(int fd) {
  pthread_mutex_lock(&lock);
  int own = -EBADF;
  if (fd >= 0 && fd < FILES_MAX && daemon_file[fd] != 0) {
    MUST(is_same_file(fd, daemon_file[fd] - 1), "closed, reused and not deregistered");
    own = fcntl(daemon_file[fd] - 1, F_DUPFD_CLOEXEC, 0);
  }
  pthread_mutex_unlock(&lock);
  return own;
}

int hf3fs_punchhole(int fd, int n, const size_t *start, const size_t *end, size_t flags) {
  const size_t chunk = (size_t)settings.chunk;
  (void)flags;
  if (n > RANGES_MAX) return EINVAL;
  for (int i = 0; i < n; ++i) {
    if (start[i] % chunk || end[i] % chunk || end[i] <= start[i]) return EINVAL;
    const off_t length = (off_t)(end[i] - start[i]);
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start[i], length)) {
      return errno;
    }
  }
  return 0;
}

/* Where the link of this memory leads; false if there is none, or not to memory. */
static bool target_of(const char *mount, const char id[16], char *link, char *target) {
  const uint8_t *u = (const uint8_t *)id;
  snprintf(link, PATH_MAX,
           "%s/3fs-virt/iovs/%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
           mount, u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12],
           u[13], u[14], u[15]);
  const ssize_t length = readlink(link, target, PATH_MAX - 1);
  if (length < 0) return false;
  target[length] = 0;
  return strncmp(target, "/dev/shm/", 9) == 0;
}

static void unmap(struct mapping *mapping) {
  munmap(mapping->base, mapping->size);
  memset(mapping, 0, sizeof *mapping);
}

static struct mapping *map(const char *link, const char *target) {
  struct stat status;
  const int fd = open(target, O_RDWR | O_CLOEXEC);
  if (fd < 0) return NULL;
  const bool is_known = fstat(fd, &status) == 0;
  const uid_t uid = settings.daemon_uid < 0 ? geteuid() : (uid_t)settings.daemon_uid;
  struct mapping *free_one = NULL;
  for (int i = 0; i < MAPPINGS_MAX; ++i) {
    char now[PATH_MAX];
    struct mapping *old = &mappings[i];
    if (old->base && old->users == 0 && readlink(old->link, now, sizeof now) < 0) unmap(old);
    if (old->base == NULL) free_one = old;
  }
  if (is_known && status.st_uid == uid && !(settings.blind > 0) && free_one != NULL) {
    const size_t size = (size_t)status.st_size;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) {
      free_one->base = base;
      free_one->size = size;
      strcpy(free_one->link, link);
      strcpy(free_one->target, target);
      close(fd);
      return free_one;
    }
  }
  close(fd);
  return NULL;
}

/* The daemon's own mapping of it, with one more user; NULL: not registered, or not to be had. */
static struct mapping *find(const char *mount, const char id[16]) {
  char link[PATH_MAX], target[PATH_MAX];
  struct mapping *found = NULL;
  pthread_mutex_lock(&lock);
  if (target_of(mount, id, link, target)) {
    for (int i = 0; i < MAPPINGS_MAX && found == NULL; ++i) {
      if (mappings[i].base && strcmp(mappings[i].target, target) == 0) found = &mappings[i];
    }
    if (found == NULL) found = map(link, target);
    if (found != NULL) ++found->users;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static int64_t read_file(uint8_t *data, int file, off_t offset, size_t length, uint64_t flags) {
  struct stat status;
  if (fstat(file, &status) != 0) return -EIO;
  const off_t wanted = offset + (off_t)length;
  const off_t end = wanted < status.st_size ? wanted : status.st_size;
  if (offset >= end) return 0;
  /* Asked only where there are holes: some file systems look through the whole file. */
  const bool is_full = status.st_blocks * 512 >= status.st_size;
  const off_t hole = is_full ? -1 : lseek(file, offset, SEEK_HOLE);
  if (hole >= 0 && hole < end) {
    count(&counters.holes);
    if (flags & FORBID_READ_HOLES) return -ENODATA;
    count(&counters.zeros);
  }
  size_t done = 0;
  while (done < (size_t)(end - offset)) {
    const size_t left = (size_t)(end - offset) - done;
    const ssize_t moved = pread(file, data + done, left, offset + (off_t)done);
    if (moved < 0) return -EIO;
    if (moved == 0) break;
    done += (size_t)moved;
  }
  return (int64_t)done;
}

static int64_t write_file(const uint8_t *data, int file, off_t offset, size_t length) {
  const size_t chunk = (size_t)settings.chunk, start = (size_t)offset, end = start + length;
  if (start % chunk) count(&counters.partial_chunk_writes);
  if (end % chunk && (start % chunk == 0 || start / chunk != end / chunk)) {
    count(&counters.partial_chunk_writes);
  }
  size_t done = 0;
  while (done < length) {
    const ssize_t moved = pwrite(file, data + done, length - done, offset + (off_t)done);
    if (moved < 0) return errno == ENOSPC || errno == EDQUOT ? -ENOSPC : -EIO;
    done += (size_t)moved;
  }
  return (int64_t)done;
}

int64_t serve(const char *mount, const char id[16], bool is_read, size_t iov_offset, int file,
              off_t offset, size_t length, uint64_t flags) {
  struct mapping *memory = find(mount, id);
  if (memory == NULL) return -EACCES;
  int64_t result = -EACCES;
  if (length <= memory->size && iov_offset <= memory->size - length) {
    uint8_t *data = memory->base + iov_offset;
    result = is_read ? read_file(data, file, offset, length, flags)
                     : write_file(data, file, offset, length);
  }
  count(is_read ? &counters.reads : &counters.writes);
  pthread_mutex_lock(&lock);
  --memory->users;
  pthread_mutex_unlock(&lock);
  return result;
}
