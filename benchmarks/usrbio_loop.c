/* A bare loop over the calls of 3FS's library: what `kvferry bench usrbio` is compared with.
 *
 *   usrbio_loop LIBRARY MOUNT FILE read|write BLOCK_BYTES BLOCK_COUNT RING_COUNT RING_DEPTH
 *
 * Each thread has a ring, and memory for RING_DEPTH blocks; it keeps as many I/Os out, and looks at no
 * byte. Prints {"elapsed_s": ..., "cpu_s": ...} of the passing alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

struct iov {
  uint8_t *base;
  void *handle;
  char id[16], mount[256];
  size_t size, block_size;
  int numa;
};
struct ior {
  struct iov iov;
  void *handle;
  char mount[256];
  bool for_read;
  int io_depth, priority, timeout;
  uint64_t flags;
};
struct cqe {
  int32_t index, reserved;
  int64_t result;
  const void *userdata;
};

static int (*iovwrap)(struct iov *, void *, const char *, const char *, size_t, size_t, int);
static int (*iorcreate)(struct ior *, const char *, int, bool, int, int, int, uint64_t);
static int (*reg_fd)(int, uint64_t);
static int (*prep)(const struct ior *, const struct iov *, bool, void *, int, size_t, uint64_t,
                   const void *);
static int (*submit)(const struct ior *);
static int (*wait_ios)(const struct ior *, struct cqe *, int, int, const struct timespec *);

static const char *mount;
static int file, depth;
static bool is_read;
static size_t block_bytes, block_count;
static size_t next_block;
static pthread_barrier_t start;

static void require(bool condition, const char *words) {
  if (condition) return;
  perror(words);
  exit(1);
}

static double now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static bool begin(struct ior *ring, struct iov *memory, uintptr_t place) {
  const size_t block = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED);
  if (block >= block_count) return false;
  const int index = prep(ring, memory, is_read, memory->base + place * block_bytes, file,
                         block * block_bytes, block_bytes, (void *)place);
  require(index >= 0, "prep");
  return true;
}

static void *pass(void *argument) {
  const int number = (int)(intptr_t)argument;
  char shared[64], link[512], id[17];
  snprintf(id, sizeof id, "%08x%08x", getpid(), number);
  snprintf(shared, sizeof shared, "/dev/shm/usrbio-loop-%d-%d", getpid(), number);
  char hex[33];
  for (int i = 0; i < 16; ++i) sprintf(hex + 2 * i, "%02x", (unsigned char)id[i]);
  snprintf(link, sizeof link, "%s/3fs-virt/iovs/%.8s-%.4s-%.4s-%.4s-%.12s", mount, hex, hex + 8,
           hex + 12, hex + 16, hex + 20);
  const size_t size = (size_t)depth * block_bytes;
  const int descriptor = open(shared, O_RDWR | O_CREAT | O_EXCL, 0600);
  require(descriptor >= 0 && posix_fallocate(descriptor, 0, (off_t)size) == 0, shared);
  void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  require(base != MAP_FAILED && symlink(shared, link) == 0, link);
  memset(base, 7, size);
  struct iov memory;
  struct ior ring;
  require(iovwrap(&memory, base, id, mount, size, 0, -1) == 0, "iovwrap");
  require(iorcreate(&ring, mount, 128, is_read, 0, 0, -1, is_read ? 2 : 0) == 0, "iorcreate");
  pthread_barrier_wait(&start);
  int out = 0;
  for (int place = 0; place < depth; ++place) out += begin(&ring, &memory, (uintptr_t)place);
  submit(&ring);
  while (out > 0) {
    struct cqe done[64];
    const int count = wait_ios(&ring, done, 64, 1, NULL);
    require(count >= 0, "wait");
    for (int i = 0; i < count; ++i) {
      require(done[i].result == (int64_t)block_bytes, "I/O");
      out += begin(&ring, &memory, (uintptr_t)done[i].userdata) - 1;
    }
    submit(&ring);
  }
  unlink(link);
  unlink(shared);
  return NULL;
}

int main(int count, char **argument) {
  require(count == 9, "arguments");
  void *library = dlopen(argument[1], RTLD_NOW);
  require(library != NULL, "dlopen");
  *(void **)&iovwrap = dlsym(library, "hf3fs_iovwrap");
  *(void **)&iorcreate = dlsym(library, "hf3fs_iorcreate4");
  *(void **)&reg_fd = dlsym(library, "hf3fs_reg_fd");
  *(void **)&prep = dlsym(library, "hf3fs_prep_io");
  *(void **)&submit = dlsym(library, "hf3fs_submit_ios");
  *(void **)&wait_ios = dlsym(library, "hf3fs_wait_for_ios");
  mount = argument[2];
  file = open(argument[3], O_RDWR);
  require(file >= 0 && reg_fd(file, 0) <= 0, argument[3]);
  is_read = strcmp(argument[4], "read") == 0;
  block_bytes = strtoull(argument[5], NULL, 10);
  block_count = strtoull(argument[6], NULL, 10);
  const int rings = atoi(argument[7]);
  depth = atoi(argument[8]);
  pthread_t threads[64];
  pthread_barrier_init(&start, NULL, (unsigned)rings + 1);
  for (int i = 0; i < rings; ++i) pthread_create(&threads[i], NULL, pass, (void *)(intptr_t)i);
  pthread_barrier_wait(&start);
  const double begun_s = now(CLOCK_MONOTONIC), begun_cpu_s = now(CLOCK_PROCESS_CPUTIME_ID);
  for (int i = 0; i < rings; ++i) pthread_join(threads[i], NULL);
  printf("{\"elapsed_s\": %.6f, \"cpu_s\": %.6f}\n", now(CLOCK_MONOTONIC) - begun_s,
         now(CLOCK_PROCESS_CPUTIME_ID) - begun_cpu_s);
  return 0;
}
