#include "usrbio_pool.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "ring_work.h"

namespace kvferry {
namespace {

constexpr double kAbandonS = 1.0;

}  // namespace

void UsrbioPool::Task::fail(size_t place, Outcome outcome, int error_number) {
  if (place >= failed_at) return;
  failed_at = place;
  result.outcome = outcome;
  result.error_number = error_number;
}

int UsrbioPool::make_ring(Hf3fsIor* ring, bool is_read) const {
  return -library_.iorcreate4(ring, settings_.mount_point.c_str(), settings_.entry_max, is_read, 0,
                              0, -1, is_read ? kForbidReadHoles : 0);
}

int UsrbioPool::start(size_t read_thread_count, size_t write_thread_count) {
  std::vector<Hf3fsIor> rings(read_thread_count + write_thread_count);
  for (size_t i = 0; i < rings.size(); ++i) {
    const int error = make_ring(&rings[i], i < read_thread_count);
    if (error == 0) continue;
    while (i-- > 0) library_.iordestroy(&rings[i]);
    return error;
  }
  const Lock lock(mutex_);
  reads_.thread_count = read_thread_count;
  writes_.thread_count = write_thread_count;
  auto self = shared_from_this();
  size_t i = 0;
  try {
    for (; i < rings.size(); ++i) {
      Queue& queue = i < read_thread_count ? reads_ : writes_;
      crew_.start(lock, 1, [self, &queue, ring = rings[i]] { RingWork(*self, queue, ring).run(); });
    }
  } catch (const std::system_error&) {
    for (; i < rings.size(); ++i) library_.iordestroy(&rings[i]);
    throw;
  }
  return 0;
}

int UsrbioPool::add_memory(uint64_t address, size_t length_bytes, const char* id) {
  Hf3fsIov memory;
  const int error = library_.iovwrap(&memory, reinterpret_cast<void*>(address), id,
                                     settings_.mount_point.c_str(), length_bytes, 0, -1);
  const Lock lock(mutex_);
  if (error == 0) memories_.push_back(memory);
  return -error;
}

void UsrbioPool::remove_memory(uint64_t address) {
  const Lock lock(mutex_);
  const auto is_it = [&](const Hf3fsIov& memory) {
    return reinterpret_cast<uint64_t>(memory.base) == address;
  };
  memories_.erase(std::remove_if(memories_.begin(), memories_.end(), is_it), memories_.end());
}

// Under the lock.
std::shared_ptr<UsrbioPool::Task> UsrbioPool::make_task(const Operation& operation) const {
  auto task = std::make_shared<Task>();
  task->operation = operation;
  task->result.checksums.resize(operation.slice_count);
  for (const Hf3fsIov& memory : memories_) {
    const uint64_t start = reinterpret_cast<uint64_t>(memory.base);
    if (operation.buffer_address < start) continue;
    const uint64_t place = operation.buffer_address - start;
    if (place > memory.size || task->length_bytes() > memory.size - place) continue;
    task->memory = memory;
    return task;
  }
  throw std::invalid_argument("buffer_address is in no memory of this pool");
}

uint64_t UsrbioPool::submit_reads(const std::vector<Operation>& operations, bool verify_payload) {
  crew_.check_process();
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<Task>> tasks;
  for (const Operation& operation : operations) {
    tasks.push_back(make_task(operation));
    tasks.back()->is_read = true;
    tasks.back()->verify_payload = verify_payload;
  }
  return submit(reads_, tasks);
}

uint64_t UsrbioPool::submit_writes(const std::vector<Operation>& operations,
                                   const std::vector<uint64_t>& checksums) {
  crew_.check_process();
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<Task>> tasks;
  auto next = checksums.begin();
  for (const Operation& operation : operations) {
    tasks.push_back(make_task(operation));
    tasks.back()->is_read = false;
    tasks.back()->has_checksums = !checksums.empty();
    if (checksums.empty()) continue;
    std::copy_n(next, operation.slice_count, tasks.back()->result.checksums.begin());
    next += operation.slice_count;
  }
  return submit(writes_, tasks);
}

uint64_t UsrbioPool::submit(Queue& queue, const std::vector<std::shared_ptr<Task>>& tasks) {
  if (is_closed_) throw std::logic_error("the I/O pool is closed");
  const uint64_t job = results_.begin_job(tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    tasks[i]->result.job = job;
    tasks[i]->result.index = i;
    queue.tasks.push_back(tasks[i]);
    queue.filled.notify_one();
  }
  return job;
}

void UsrbioPool::put(std::shared_ptr<Task> task) {
  const Lock lock(mutex_);
  results_.put(std::move(task->result));
}

std::vector<Result> UsrbioPool::wait(double timeout_s) {
  crew_.check_process();
  Lock lock(mutex_);
  return results_.take(lock, timeout_s);
}

bool UsrbioPool::close(double timeout_s) {
  if (crew_.is_forked()) return true;
  Lock lock(mutex_);
  is_closed_ = true;
  reads_.filled.notify_all();
  writes_.filled.notify_all();
  bool is_gone = crew_.wait_gone(lock, deadline_after(timeout_s));
  if (!is_gone) {
    must_abandon_ = true;
    reads_.filled.notify_all();
    writes_.filled.notify_all();
    is_gone = crew_.wait_gone(lock, deadline_after(kAbandonS));
  }
  reads_.tasks.clear();
  writes_.tasks.clear();
  return is_gone;
}

}  // namespace kvferry
