/* Rings: slots that one thread fills and one empties, and the thread that plays the daemon. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hf3fs.h"

enum state { FREE, PREPARED, SUBMITTED, RUNNING, DONE, LOST };

struct slot {
  enum state state;
  uint64_t turn; /* when it was prepared, among those of its ring */
  char id[16];
  size_t iov_offset;
  int file;
  off_t offset;
  size_t length;
  const void *userdata;
  int64_t result;
  struct timespec due; /* when a finished one is seen */
};

static const uint64_t ALIVE = 0x676e6972, DEAD = 0x64616564;

struct ring {
  uint64_t magic;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t daemon, preparer, waiter;
  bool has_preparer, has_waiter, is_ending;
  bool for_read;
  uint64_t flags, turns;
  char mount[256];
  int entries;
  bool has_again;
  struct hf3fs_cqe again; /* was returned, and will be once more */
  struct slot slots[];
};

static struct ring *ring_of(const struct hf3fs_ior *ior) {
  struct ring *ring = ior->iorh;
  MUST(ring != NULL && ring->magic == ALIVE, "the ring was destroyed");
  return ring;
}

static struct timespec after(double wait_s) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const double nanoseconds = (double)now.tv_nsec + wait_s * 1e9;
  now.tv_sec += (time_t)(nanoseconds / 1e9);
  now.tv_nsec = (long)(nanoseconds - 1e9 * (double)(time_t)(nanoseconds / 1e9));
  return now;
}

static bool is_past(struct timespec time) {
  const struct timespec now = after(0);
  return now.tv_sec > time.tv_sec || (now.tv_sec == time.tv_sec && now.tv_nsec >= time.tv_nsec);
}

/* The next one to serve, or NULL: the one that was prepared first, unless by chance. Prepared ones
 * may begin before they are submitted. */
static struct slot *next_slot(struct ring *ring) {
  struct slot *found = NULL;
  int seen = 0;
  for (int i = 0; i < ring->entries; ++i) {
    struct slot *slot = &ring->slots[i];
    const bool is_early = slot->state == PREPARED && happens(settings.implicit);
    if (is_early) count(&counters.implicit);
    if (slot->state != SUBMITTED && !is_early) continue;
    const bool is_first = found == NULL || (settings.reorder <= 0 && slot->turn < found->turn);
    if (is_first || (settings.reorder > 0 && chance() * ++seen < 1)) found = slot;
    if (is_early) return slot;
  }
  return found;
}

static int64_t fault(bool is_read) {
  if (happens(settings.eio)) return count(&counters.eio), -EIO;
  if (!is_read && happens(settings.enospc)) return count(&counters.enospc), -ENOSPC;
  if (happens(settings.eremoteio)) return count(&counters.eremoteio), -EREMOTEIO;
  if (happens(settings.eintr)) return count(&counters.eintr), -EINTR;
  return 0;
}

static void *work(void *argument) {
  struct ring *ring = argument;
  pthread_mutex_lock(&ring->lock);
  while (!ring->is_ending) {
    struct slot *slot = next_slot(ring);
    if (slot == NULL) {
      const struct timespec limit = after(0.1);
      pthread_cond_timedwait(&ring->changed, &ring->lock, &limit);
      continue;
    }
    slot->state = RUNNING;
    const struct slot io = *slot;
    pthread_mutex_unlock(&ring->lock);
    int64_t result = fault(ring->for_read);
    if (settings.delay_us > 0) usleep((useconds_t)(chance() * settings.delay_us));
    if (result == 0) {
      result = serve(ring->mount, io.id, ring->for_read, io.iov_offset, io.file, io.offset,
                     io.length, ring->flags);
    }
    const bool is_lost = happens(settings.lost), is_late = !is_lost && happens(settings.late);
    if (is_lost) count(&counters.lost);
    if (is_late) count(&counters.late);
    close(io.file);
    pthread_mutex_lock(&ring->lock);
    slot->result = result;
    slot->due = after(is_late ? settings.late_ms / 1e3 : 0);
    slot->state = is_lost ? LOST : DONE;
    pthread_cond_broadcast(&ring->changed);
  }
  pthread_mutex_unlock(&ring->lock);
  return NULL;
}

size_t hf3fs_ior_size(int entries) { return (size_t)entries * sizeof(struct slot); }

int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const char id[16], const char *mount,
                  size_t size, size_t block_size, int numa) {
  if (strlen(mount) >= sizeof iov->mount_point) return -EINVAL;
  *iov = (struct hf3fs_iov){.base = base, .size = size, .block_size = block_size, .numa = numa};
  memcpy(iov->id, id, sizeof iov->id);
  strcpy(iov->mount_point, mount);
  return 0;
}

int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read,
                     int io_depth, int timeout, int numa, uint64_t flags) {
  char found[256];
  (void)numa;
  if (entries <= 0 || timeout < 0 || strlen(mount) >= sizeof ior->mount_point) return -EINVAL;
  if (settings.refuse_rings > 0) return -(int)settings.refuse_rings;
  if (mount_of(found, sizeof found, mount) < 0 || strcmp(found, mount) != 0) return -ENOENT;
  struct ring *ring = calloc(1, sizeof *ring + (size_t)entries * sizeof(struct slot));
  ring->magic = ALIVE;
  ring->for_read = for_read;
  ring->flags = flags;
  ring->entries = entries;
  strcpy(ring->mount, mount);
  pthread_mutex_init(&ring->lock, NULL);
  pthread_cond_init(&ring->changed, NULL);
  *ior = (struct hf3fs_ior){.iorh = ring, .for_read = for_read, .io_depth = io_depth,
                            .timeout = timeout, .flags = flags};
  ior->iov.size = hf3fs_ior_size(entries);
  strcpy(ior->mount_point, mount);
  count(&counters.rings);
  return -pthread_create(&ring->daemon, NULL, work, ring);
}

/* The real one ends a ring whatever the daemon still does in its callers' memory. Here only what
 * was lost or is late may be out: it is dropped, and touches nothing any more. */
void hf3fs_iordestroy(struct hf3fs_ior *ior) {
  struct ring *ring = ring_of(ior);
  pthread_mutex_lock(&ring->lock);
  for (int i = 0; i < ring->entries; ++i) {
    const struct slot *slot = &ring->slots[i];
    const bool is_overdue = slot->state == LOST || (slot->state == DONE && !is_past(slot->due));
    MUST(slot->state == FREE || is_overdue, "I/O of this ring is not finished");
    if (is_overdue) count(&counters.dropped);
  }
  ring->is_ending = true;
  pthread_cond_broadcast(&ring->changed);
  pthread_mutex_unlock(&ring->lock);
  pthread_join(ring->daemon, NULL);
  ring->magic = DEAD; /* and never freed, so that later use is seen */
  __atomic_sub_fetch(&counters.rings, 1, __ATOMIC_SEQ_CST);
}

int hf3fs_io_entries(const struct hf3fs_ior *ior) { return ring_of(ior)->entries; }

int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool is_read,
                  void *data, int fd, size_t offset, uint64_t length, const void *userdata) {
  struct ring *ring = ring_of(ior);
  const size_t iov_offset = (size_t)((uint8_t *)data - iov->base);
  if (is_read != ring->for_read || length == 0) return -EINVAL;
  MUST((uint8_t *)data >= iov->base && length <= iov->size && iov_offset <= iov->size - length,
       "a pointer outside of its memory");
  const int mode = fcntl(fd, F_GETFL);
  const int file = registered_file(fd);
  if (file < 0) return file;
  if ((mode & O_ACCMODE) == (is_read ? O_WRONLY : O_RDONLY)) {
    close(file);
    return -EACCES;
  }
  pthread_mutex_lock(&ring->lock);
  MUST(!ring->has_preparer || pthread_equal(ring->preparer, pthread_self()),
       "two threads prepare on one ring");
  ring->has_preparer = true;
  ring->preparer = pthread_self();
  int index = 0;
  while (index < ring->entries && ring->slots[index].state != FREE) ++index;
  if (index < ring->entries) {
    struct slot *slot = &ring->slots[index];
    *slot = (struct slot){PREPARED, ++ring->turns, {0}, iov_offset, file, (off_t)offset, length,
                          userdata, 0, {0}};
    memcpy(slot->id, iov->id, sizeof slot->id);
    if (settings.implicit > 0) pthread_cond_broadcast(&ring->changed);
  } else {
    close(file);
  }
  pthread_mutex_unlock(&ring->lock);
  return index < ring->entries ? index : -EAGAIN;
}

int hf3fs_submit_ios(const struct hf3fs_ior *ior) {
  struct ring *ring = ring_of(ior);
  pthread_mutex_lock(&ring->lock);
  for (int i = 0; i < ring->entries; ++i) {
    if (ring->slots[i].state == PREPARED) ring->slots[i].state = SUBMITTED;
  }
  count(&counters.batches);
  pthread_cond_broadcast(&ring->changed);
  pthread_mutex_unlock(&ring->lock);
  return 0;
}

static int take_ready(struct ring *ring, struct hf3fs_cqe *cqes, int cqe_max) {
  int taken = 0;
  if (ring->has_again) {
    cqes[taken++] = ring->again;
    ring->has_again = false;
    count(&counters.again);
  }
  const int first = settings.reorder > 0 ? (int)(chance() * ring->entries) : 0;
  for (int i = 0; i < ring->entries && taken < cqe_max; ++i) {
    const int index = (first + i) % ring->entries;
    struct slot *slot = &ring->slots[index];
    if (slot->state != DONE || !is_past(slot->due)) continue;
    if (taken + 1 < cqe_max && happens(settings.foreign)) {
      cqes[taken++] = (struct hf3fs_cqe){index, 0, slot->result, (void *)(INTPTR_MAX - index)};
      count(&counters.foreign);
    }
    cqes[taken++] = (struct hf3fs_cqe){index, 0, slot->result, slot->userdata};
    if (happens(settings.again)) {
      ring->again = cqes[taken - 1];
      ring->has_again = true;
    }
    slot->state = FREE;
    if (settings.fewer > 0 && chance() < 0.5) {
      count(&counters.fewer);
      break;
    }
  }
  return taken;
}

int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqe_max,
                       int result_min, const struct timespec *deadline) {
  struct ring *ring = ring_of(ior);
  if (cqe_max <= 0) return -EINVAL;
  if (settings.deaf > 0) return count(&counters.deaf), -(int)settings.deaf;
  pthread_mutex_lock(&ring->lock);
  MUST(!ring->has_waiter || pthread_equal(ring->waiter, pthread_self()),
       "two threads wait on one ring");
  ring->has_waiter = true;
  ring->waiter = pthread_self();
  int taken = take_ready(ring, cqes, cqe_max);
  while (taken < result_min && (deadline == NULL || !is_past(*deadline))) {
    struct timespec limit = after(0.001);
    pthread_cond_timedwait(&ring->changed, &ring->lock, &limit);
    taken += take_ready(ring, cqes + taken, cqe_max - taken);
  }
  pthread_mutex_unlock(&ring->lock);
  return taken;
}
