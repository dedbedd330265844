/* Settings, chance and counters of the emulation, and which folder is a mount. */
#include "hf3fs.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct settings settings = {.chunk = 1 << 20, .daemon_uid = -1};
struct counters counters;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t state = 1;

#define NAMED(kind, name) {#name, offsetof(struct kind, name)}
static const struct name {
  const char *name;
  size_t offset;
} setting_names[] = {
    NAMED(settings, seed),         NAMED(settings, chunk),     NAMED(settings, eio),
    NAMED(settings, enospc),       NAMED(settings, eremoteio), NAMED(settings, eintr),
    NAMED(settings, lost),         NAMED(settings, late),      NAMED(settings, late_ms),
    NAMED(settings, delay_us),     NAMED(settings, reorder),   NAMED(settings, fewer),
    NAMED(settings, implicit),     NAMED(settings, daemon_uid), NAMED(settings, blind),
    NAMED(settings, again),        NAMED(settings, foreign),   NAMED(settings, deaf),
    NAMED(settings, refuse_rings), NAMED(settings, refuse_files)},
  counter_names[] = {
    NAMED(counters, reads),     NAMED(counters, writes),    NAMED(counters, partial_chunk_writes),
    NAMED(counters, batches),   NAMED(counters, eio),       NAMED(counters, enospc),
    NAMED(counters, eremoteio), NAMED(counters, eintr),     NAMED(counters, lost),
    NAMED(counters, late),      NAMED(counters, dropped),   NAMED(counters, holes),
    NAMED(counters, zeros),     NAMED(counters, implicit),
    NAMED(counters, again),     NAMED(counters, foreign),   NAMED(counters, deaf),
    NAMED(counters, fewer),     NAMED(counters, rings),     NAMED(counters, files)};

static size_t offset_of(const struct name *names, size_t name_count, const char *wanted) {
  for (size_t i = 0; i < name_count; ++i) {
    if (strcmp(names[i].name, wanted) == 0) return names[i].offset;
  }
  fprintf(stderr, "emulated hf3fs: there is no %s\n", wanted);
  abort();
}

void hf3fs_emulation_configure(const char *text) {
  char *copy = strdup(text), *rest = copy, *item;
  pthread_mutex_lock(&lock);
  settings = (struct settings){.chunk = 1 << 20, .daemon_uid = -1};
  while ((item = strsep(&rest, ",")) != NULL) {
    char *value = strchr(item, '=');
    if (value == NULL) continue;
    *value++ = 0;
    const size_t name_count = sizeof setting_names / sizeof *setting_names;
    const size_t offset = offset_of(setting_names, name_count, item);
    *(double *)((char *)&settings + offset) = atof(value);
  }
  state = (uint64_t)settings.seed * 2 + 1;
  pthread_mutex_unlock(&lock);
  free(copy);
}

uint64_t hf3fs_emulation_count(const char *name) {
  const size_t name_count = sizeof counter_names / sizeof *counter_names;
  const size_t offset = offset_of(counter_names, name_count, name);
  return __atomic_load_n((uint64_t *)((char *)&counters + offset), __ATOMIC_SEQ_CST);
}

__attribute__((constructor)) static void load(void) {
  const char *text = getenv("HF3FS_EMULATION");
  if (text != NULL) hf3fs_emulation_configure(text);
}

double chance(void) {
  pthread_mutex_lock(&lock);
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  const double drawn = (double)(state >> 11) / (double)(1ull << 53);
  pthread_mutex_unlock(&lock);
  return drawn;
}

bool happens(double rate) { return rate > 0 && chance() < rate; }

void count(uint64_t *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST); }

int mount_of(char *out, int size, const char *path) {
  char folder[PATH_MAX], inside[PATH_MAX + 32];
  if (realpath(path, folder) == NULL) return -1;
  while (true) {
    struct stat status;
    snprintf(inside, sizeof inside, "%s/3fs-virt/iovs", folder);
    if (stat(inside, &status) == 0) break;
    char *end = strrchr(folder, '/');
    if (end == NULL || end == folder) return -1;
    *end = 0;
  }
  const int length = (int)strlen(folder);
  if (length < size) strcpy(out, folder);
  return length + 1;
}

int hf3fs_extract_mount_point(char *out, int size, const char *path) {
  return mount_of(out, size, path);
}

/* By where the descriptor's file is, or was before it was deleted. */
bool hf3fs_is_hf3fs(int fd) {
  char link[64], path[PATH_MAX], mount[256];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0 || path[0] != '/') return false;
  path[length] = 0;
  char *end = strrchr(path, '/');
  if (end != path) *end = 0;
  return mount_of(mount, sizeof mount, path) > 0;
}
