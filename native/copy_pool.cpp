#include "copy_pool.h"

#include <utility>

namespace kvferry {

void CopyPool::start(size_t thread_count) {
  const Lock lock(mutex_);
  crew_.start(lock, thread_count, [self = shared_from_this()] { self->work(); });
}

uint64_t CopyPool::submit(const BlockMap& map, bool is_gather, std::vector<Piece> pieces) {
  crew_.check_process();
  for (const Piece& piece : pieces) map.check_fits(piece.blocks.size());
  const size_t piece_count = pieces.size();
  auto job = std::make_shared<Job>(Job{0, map, is_gather, std::move(pieces), piece_count});
  const Lock lock(mutex_);
  if (is_closed_) throw std::logic_error("the copy pool is closed");
  job->number = ++last_job_;
  if (piece_count == 0) done_.push_back(job->number);
  if (piece_count > 0) unfinished_.insert(job->number);
  for (size_t i = 0; i < piece_count; ++i) {
    queue_.push_back({job, i});
    queued_.notify_one();
  }
  return job->number;
}

std::vector<uint64_t> CopyPool::poll() {
  const Lock lock(mutex_);
  return std::exchange(done_, {});
}

bool CopyPool::finish(const Jobs& jobs, double timeout_s) {
  crew_.check_process();
  const Deadline deadline = deadline_after(timeout_s);
  const auto is_wanted = [&](const Task& task) { return jobs.count(task.job->number) > 0; };
  Lock lock(mutex_);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto found = std::find_if(queue_.begin(), queue_.end(), is_wanted);
    if (found == queue_.end()) break;
    const Task task = *found;
    queue_.erase(found);
    run(task, lock);
  }
  return finished_.wait_until(lock, deadline, [&] { return is_done(jobs); });
}

void CopyPool::close() {
  if (crew_.is_forked()) return;
  Lock lock(mutex_);
  is_closed_ = true;
  queued_.notify_all();
  crew_.wait_gone(lock, Deadline::max());
}

void CopyPool::work() {
  Lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Task task = queue_.front();
    queue_.pop_front();
    run(task, lock);
  }
}

// Gives the lock up while it copies.
void CopyPool::run(const Task& task, Lock& lock) {
  Job& job = *task.job;
  const Piece& piece = job.pieces[task.piece_index];
  lock.unlock();
  if (job.is_gather) {
    job.map.gather(piece.blocks, piece.address);
  } else {
    job.map.scatter(piece.blocks, piece.address);
  }
  lock.lock();
  if (--job.unfinished_count > 0) return;
  unfinished_.erase(job.number);
  done_.push_back(job.number);
  finished_.notify_all();
}

bool CopyPool::is_done(const Jobs& jobs) const {
  return std::none_of(jobs.begin(), jobs.end(),
                      [this](uint64_t job) { return unfinished_.count(job) > 0; });
}

}  // namespace kvferry
