#include "io_pool.h"

#include <cerrno>
#include <utility>

#include "checksum.h"

namespace kvferry {
namespace {

Outcome outcome_of(int error_number) {
  const bool is_full = error_number == ENOSPC || error_number == EDQUOT;
  return is_full ? Outcome::kNoSpace : Outcome::kIoError;
}

uint64_t payload_checksum(const Operation& operation, size_t index) {
  return checksum(operation.slice(index) + kHeaderBytes, operation.slice_bytes - kHeaderBytes);
}

struct Transfer {
  size_t done_bytes = 0;
  int error_number = 0;
};

// Repeats `call` (pread or pwrite) until the extent is done, nothing more comes or it fails.
template <class Call>
Transfer transfer(const Operation& operation, Call call) {
  Transfer state;
  while (state.done_bytes < operation.extent_bytes()) {
    const ssize_t count = call(operation.descriptor, operation.slice(0) + state.done_bytes,
                               operation.extent_bytes() - state.done_bytes,
                               static_cast<off_t>(operation.offset_bytes + state.done_bytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) state.error_number = errno;
    if (count <= 0) break;
    state.done_bytes += count;
  }
  return state;
}

// Past a ragged end of file, direct I/O says EINVAL where buffered I/O says 0.
bool is_end_of_file(const Transfer& state) {
  return state.error_number == 0 || (state.error_number == EINVAL && state.done_bytes > 0);
}

}  // namespace

void IoPool::start(size_t read_thread_count, size_t write_thread_count) {
  const Lock lock(mutex_);
  auto self = shared_from_this();
  crew_.start(lock, read_thread_count, [self] { self->work(self->reads_, read); });
  crew_.start(lock, write_thread_count, [self] { self->work(self->writes_, write); });
}

uint64_t IoPool::submit_reads(std::vector<Operation> operations, bool verify_payload) {
  std::vector<Task> tasks;
  for (Operation& operation : operations) tasks.push_back({operation, {}, verify_payload});
  return submit(reads_, std::move(tasks));
}

uint64_t IoPool::submit_writes(std::vector<Operation> operations,
                               const std::vector<uint64_t>& checksums) {
  std::vector<Task> tasks;
  auto next = checksums.begin();
  for (Operation& operation : operations) {
    tasks.push_back({operation, {}, false});
    if (checksums.empty()) continue;
    tasks.back().result.checksums.assign(next, next + operation.slice_count);
    next += operation.slice_count;
  }
  return submit(writes_, std::move(tasks));
}

uint64_t IoPool::submit(Queue& queue, std::vector<Task> tasks) {
  crew_.check_process();
  const Lock lock(mutex_);
  if (is_closed_) throw std::logic_error("the I/O pool is closed");
  ++last_job_;
  for (size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].result.job = last_job_;
    tasks[i].result.index = i;
    queue.tasks.push_back(std::move(tasks[i]));
    queue.filled.notify_one();
  }
  return last_job_;
}

std::vector<Result> IoPool::wait(double timeout_s) {
  crew_.check_process();
  Lock lock(mutex_);
  has_results_.wait_until(lock, deadline_after(timeout_s), [this] { return !results_.empty(); });
  return std::exchange(results_, {});
}

bool IoPool::close(double timeout_s) {
  if (crew_.is_forked()) return true;
  Lock lock(mutex_);
  is_closed_ = true;
  reads_.filled.notify_all();
  writes_.filled.notify_all();
  const bool is_gone = crew_.wait_gone(lock, deadline_after(timeout_s));
  reads_.tasks.clear();
  writes_.tasks.clear();
  return is_gone;
}

void IoPool::work(Queue& queue, void (*run)(Task&)) {
  Lock lock(mutex_);
  while (true) {
    queue.filled.wait(lock, [&] { return is_closed_ || !queue.tasks.empty(); });
    if (queue.tasks.empty()) return;
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    lock.unlock();
    run(task);
    lock.lock();
    results_.push_back(std::move(task.result));
    has_results_.notify_all();
  }
}

void IoPool::read(Task& task) {
  const Operation& operation = task.operation;
  Result& result = task.result;
  const Transfer state = transfer(operation, ::pread);
  if (state.done_bytes < operation.extent_bytes()) {
    const bool is_short = is_end_of_file(state);
    result.outcome = is_short ? Outcome::kShort : Outcome::kIoError;
    result.error_number = is_short ? 0 : state.error_number;
    return;
  }
  for (size_t i = 0; i < operation.slice_count; ++i) {
    const auto& header = *reinterpret_cast<const SliceHeader*>(operation.slice(i));
    result.outcome = verify(header, operation.page, operation.first_slice + i);
    if (result.outcome != Outcome::kOk) return;
    result.checksums.push_back(header.payload_checksum);
    if (task.verify_payload && payload_checksum(operation, i) != header.payload_checksum) {
      result.outcome = Outcome::kCorrupt;
      return;
    }
  }
}

void IoPool::write(Task& task) {
  const Operation& operation = task.operation;
  Result& result = task.result;
  if (result.checksums.empty()) {
    for (size_t i = 0; i < operation.slice_count; ++i) {
      result.checksums.push_back(payload_checksum(operation, i));
    }
  }
  for (size_t i = 0; i < operation.slice_count; ++i) {
    stamp(*reinterpret_cast<SliceHeader*>(operation.slice(i)), operation.page,
          operation.first_slice + i, result.checksums[i]);
  }
  const Transfer state = transfer(operation, ::pwrite);
  if (state.done_bytes == operation.extent_bytes()) return;
  result.error_number = state.error_number ? state.error_number : EIO;
  result.outcome = outcome_of(result.error_number);
}

}  // namespace kvferry
