#include "io_pool.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "checksum.h"

namespace kvferry {
namespace {

// Buffered I/O goes piece by piece, so that the checksum finds in the processor's cache what was
// just copied, or brings there what is about to be. Direct I/O takes the extent at once.
constexpr size_t kPieceBytes = 256 << 10;

bool is_direct(const Operation& operation) {
  return ::fcntl(operation.descriptor, F_GETFL) & O_DIRECT;
}

// A part of an extent has at least so many bytes, as far as slices allow.
constexpr size_t kPartBytes = 1 << 20;

constexpr int kNiceLevels = 5;

struct Transfer {
  size_t done_bytes = 0;
  int error_number = 0;
};

// Bytes of an extent.
struct Range {
  size_t start_bytes;
  size_t length_bytes;
};

// Repeats `call` (pread or pwrite) until the range is done, nothing more comes or it fails.
template <class Call>
Transfer transfer(const Operation& operation, Range range, Call call) {
  Transfer state;
  while (state.done_bytes < range.length_bytes) {
    const size_t place_bytes = range.start_bytes + state.done_bytes;
    const ssize_t moved_bytes = call(operation.descriptor, operation.slice(0) + place_bytes,
                                     range.length_bytes - state.done_bytes,
                                     static_cast<off_t>(operation.offset_bytes + place_bytes));
    if (moved_bytes < 0 && errno == EINTR) continue;
    if (moved_bytes < 0) state.error_number = errno;
    if (moved_bytes <= 0) break;
    state.done_bytes += moved_bytes;
  }
  return state;
}

Range range_of(const Operation& operation, const Part& part) {
  return {part.first * operation.slice_bytes, part.count * operation.slice_bytes};
}

bool read_range(const Operation& operation, Range range, Part& part) {
  const Transfer state = transfer(operation, range, ::pread);
  if (state.done_bytes == range.length_bytes) return true;
  part.error_number = state.error_number;
  part.outcome = state.error_number ? Outcome::kIoError : Outcome::kShort;
  return false;
}

bool write_range(const Operation& operation, Range range, Part& part) {
  const Transfer state = transfer(operation, range, ::pwrite);
  if (state.done_bytes == range.length_bytes) return true;
  part.error_number = state.error_number ? state.error_number : EIO;
  part.outcome = outcome_of_write(part.error_number);
  return false;
}

// Reads a slice piece by piece and proves it. The header comes first.
bool read_slice(const Operation& operation, uint32_t index, bool verify_payload,
                uint64_t& checksum, Part& part) {
  RunningChecksum running;
  size_t proven_bytes = kHeaderBytes;
  for (size_t place = 0; place < operation.slice_bytes; place += kPieceBytes) {
    const size_t end = std::min(place + kPieceBytes, operation.slice_bytes);
    const Range piece{index * operation.slice_bytes + place, end - place};
    if (!read_range(operation, piece, part)) return false;
    if (place == 0) part.outcome = check_header(operation, index, checksum);
    if (part.outcome != Outcome::kOk) return false;
    if (verify_payload) running.add(operation.slice(index) + proven_bytes, end - proven_bytes);
    proven_bytes = end;
  }
  if (!verify_payload || running.value() == checksum) return true;
  part.outcome = Outcome::kCorrupt;
  return false;
}

// Writes a slice whose checksum is not known yet. The header goes last.
bool put_slice(const Operation& operation, uint32_t index, uint64_t& checksum, Part& part) {
  RunningChecksum running;
  const size_t start = index * operation.slice_bytes;
  for (size_t place = kHeaderBytes; place < operation.slice_bytes; place += kPieceBytes) {
    const size_t length = std::min(kPieceBytes, operation.slice_bytes - place);
    running.add(operation.slice(index) + place, length);
    if (!write_range(operation, {start + place, length}, part)) return false;
  }
  checksum = running.value();
  stamp_header(operation, index, checksum);
  return write_range(operation, {start, kHeaderBytes}, part);
}

}  // namespace

void IoPool::start(size_t read_thread_count, size_t write_thread_count) {
  const Lock lock(mutex_);
  auto self = shared_from_this();
  crew_.start(lock, read_thread_count, [self] { self->work(self->reads_, read); });
  crew_.start(lock, write_thread_count, [self] { self->work(self->writes_, write); });
}

std::shared_ptr<IoPool::Task> IoPool::make_task(const Operation& operation) {
  auto task = std::make_shared<Task>();
  task->operation = operation;
  task->is_direct = is_direct(operation);
  const size_t least_slices = (kPartBytes + operation.slice_bytes - 1) / operation.slice_bytes;
  task->part_slices = task->is_direct ? operation.slice_count : least_slices;
  task->result.checksums.resize(operation.slice_count);
  return task;
}

uint64_t IoPool::submit_reads(const std::vector<Operation>& operations, bool verify_payload) {
  std::vector<std::shared_ptr<Task>> tasks;
  for (const Operation& operation : operations) {
    tasks.push_back(make_task(operation));
    tasks.back()->verify_payload = verify_payload;
  }
  return submit(reads_, tasks);
}

uint64_t IoPool::submit_writes(const std::vector<Operation>& operations,
                               const std::vector<uint64_t>& checksums) {
  std::vector<std::shared_ptr<Task>> tasks;
  auto next = checksums.begin();
  for (const Operation& operation : operations) {
    tasks.push_back(make_task(operation));
    tasks.back()->has_checksums = !checksums.empty();
    if (checksums.empty()) continue;
    std::copy_n(next, operation.slice_count, tasks.back()->result.checksums.begin());
    next += operation.slice_count;
  }
  return submit(writes_, tasks);
}

uint64_t IoPool::submit(Queue& queue, const std::vector<std::shared_ptr<Task>>& tasks) {
  crew_.check_process();
  Lock lock(mutex_);
  if (is_closed_) throw std::logic_error("the I/O pool is closed");
  const uint64_t job = results_.begin_job(tasks.size());
  size_t part_count = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    Task& task = *tasks[i];
    task.result.job = job;
    task.result.index = i;
    part_count += (task.operation.slice_count + task.part_slices - 1) / task.part_slices;
    queue.tasks.push_back(tasks[i]);
  }
  lock.unlock();  // who is woken wants it
  for (size_t i = 0; i < part_count; ++i) queue.filled.notify_one();
  return job;
}

void IoPool::limit_reads(size_t thread_count) {
  const Lock lock(mutex_);
  reads_.busy_max = thread_count;
  reads_.filled.notify_all();
}

size_t IoPool::reading_count() {
  const Lock lock(mutex_);
  return reads_.busy_count;
}

std::vector<Result> IoPool::wait(double timeout_s) {
  crew_.check_process();
  Lock lock(mutex_);
  return results_.take(lock, timeout_s);
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

void IoPool::work(Queue& queue, void (*run)(Task&, Part&)) {
  be_nice(kNiceLevels);
  Lock lock(mutex_);
  while (true) {
    queue.filled.wait(lock, [&] {
      return is_closed_ || (!queue.tasks.empty() && queue.busy_count < queue.busy_max);
    });
    if (queue.tasks.empty()) return;
    const std::shared_ptr<Task> task = queue.tasks.front();
    const uint32_t left_slices = task->operation.slice_count - task->begun_count;
    Part part{task->begun_count, std::min(task->part_slices, left_slices)};
    task->begun_count += part.count;
    if (part.count == left_slices) queue.tasks.pop_front();
    ++queue.busy_count;
    lock.unlock();
    run(*task, part);
    lock.lock();
    --queue.busy_count;
    end_part(*task, part);
  }
}

// Under the lock. The first slice that fails decides the outcome.
void IoPool::end_part(Task& task, const Part& part) {
  if (part.outcome != Outcome::kOk && part.first < task.failed) {
    task.failed = part.first;
    task.result.outcome = part.outcome;
    task.result.error_number = part.error_number;
  }
  task.ended_count += part.count;
  if (task.ended_count < task.operation.slice_count) return;
  results_.put(std::move(task.result));
}

void IoPool::read(Task& task, Part& part) {
  const Operation& operation = task.operation;
  if (task.is_direct && !read_range(operation, range_of(operation, part), part)) return;
  for (uint32_t i = part.first; i < part.first + part.count; ++i) {
    uint64_t& checksum = task.result.checksums[i];
    if (!task.is_direct) {
      if (!read_slice(operation, i, task.verify_payload, checksum, part)) return;
      continue;
    }
    part.outcome = prove_slice(operation, i, task.verify_payload, checksum);
    if (part.outcome != Outcome::kOk) return;
  }
}

void IoPool::write(Task& task, Part& part) {
  const Operation& operation = task.operation;
  const bool is_piecewise = !task.has_checksums && !task.is_direct;
  for (uint32_t i = part.first; i < part.first + part.count; ++i) {
    uint64_t& known = task.result.checksums[i];
    if (!is_piecewise) {
      stamp_slice(operation, i, task.has_checksums, known);
    } else if (!put_slice(operation, i, known, part)) {
      return;
    }
  }
  if (!is_piecewise) write_range(operation, range_of(operation, part), part);
}

}  // namespace kvferry
