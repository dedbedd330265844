// Threads that gather and scatter, piece by piece, in the order of submission.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "block_map.h"
#include "crew.h"

namespace kvferry {

struct Piece {
  std::vector<int64_t> blocks;
  uint64_t address;  // of the extent's first header
};

class CopyPool : public std::enable_shared_from_this<CopyPool> {
 public:
  using Jobs = std::unordered_set<uint64_t>;

  void start(size_t thread_count);

  // Returns the job's number, from 1 on. Throws std::logic_error after close.
  uint64_t submit(const BlockMap& map, bool is_gather, std::vector<Piece> pieces);

  // Jobs done since the last call.
  std::vector<uint64_t> poll();

  // The caller works on what these jobs still have in the queue, then waits for the rest.
  // False if time ran out.
  bool finish(const Jobs& jobs, double timeout_s);

  // Finishes what was submitted. Idempotent.
  void close();

 private:
  struct Job {
    uint64_t number;
    BlockMap map;
    bool is_gather;
    std::vector<Piece> pieces;
    size_t unfinished_count;
  };
  struct Task {
    std::shared_ptr<Job> job;
    size_t piece_index;
  };

  void work();
  void run(const Task& task, Lock& lock);
  bool is_done(const Jobs& jobs) const;

  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<Task> queue_;
  Jobs unfinished_;
  std::vector<uint64_t> done_;
  uint64_t last_job_ = 0;
  bool is_closed_ = false;
  Crew crew_;
};

}  // namespace kvferry
