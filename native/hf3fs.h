// The C interface of 3FS's libhf3fs_api_shared.so, found at run time: nothing of 3FS is needed to
// build this. Names and layouts are the library's own.
#pragma once

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry {

struct Hf3fsIov {
  uint8_t* base;
  void* handle;
  char id[16];
  char mount_point[256];
  size_t size;
  size_t block_size;
  int numa;
};

struct Hf3fsIor {
  Hf3fsIov iov;
  void* handle;
  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

struct Hf3fsCqe {
  int32_t index;
  int32_t reserved;
  int64_t result;
  const void* userdata;
};

inline constexpr uint64_t kForbidReadHoles = 2;

// Never unloaded: it has threads and tables of its own. Results: 0 or -errno unless said.
struct Hf3fs {
  // Throws std::runtime_error with the loader's words.
  static Hf3fs load(const std::string& path);

  int (*extract_mount_point)(char* out, int size, const char* path);  // length + 1, or -1
  int (*iovwrap)(Hf3fsIov*, void* base, const char* id, const char* mount_point, size_t size,
                 size_t block_size, int numa);
  int (*iorcreate4)(Hf3fsIor*, const char* mount_point, int entries, bool for_read, int io_depth,
                    int timeout, int numa, uint64_t flags);
  void (*iordestroy)(Hf3fsIor*);
  int (*reg_fd)(int descriptor, uint64_t flags);  // positive: errno
  void (*dereg_fd)(int descriptor);
  int (*prep_io)(const Hf3fsIor*, const Hf3fsIov*, bool is_read, void* data, int descriptor,
                 size_t offset, uint64_t length, const void* userdata);  // an index or -errno
  int (*submit_ios)(const Hf3fsIor*);
  // `deadline` by CLOCK_REALTIME. The count, or -errno.
  int (*wait_for_ios)(const Hf3fsIor*, Hf3fsCqe*, int cqe_max, int result_min,
                      const timespec* deadline);
  int (*punchhole)(int descriptor, int count, const size_t* start, const size_t* end,
                   size_t flags);
};

}  // namespace kvferry
