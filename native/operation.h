// Extents on their way between memory and files: what is asked, how it ended, and the proof of it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "crew.h"
#include "slice_header.h"

namespace kvferry {

// One extent. Trusted: `buffer_address` names slice_count * slice_bytes bytes.
struct Operation {
  int descriptor;
  int64_t offset_bytes;
  uint64_t buffer_address;
  uint32_t first_slice;
  uint32_t slice_count;
  size_t slice_bytes;
  SliceHeader page;  // the template of its headers

  uint8_t* slice(uint32_t index) const {
    return reinterpret_cast<uint8_t*>(buffer_address) + index * slice_bytes;
  }
  SliceHeader& header(uint32_t index) const {
    return *reinterpret_cast<SliceHeader*>(slice(index));
  }
};

struct Result {
  uint64_t job;
  size_t index;
  Outcome outcome = Outcome::kOk;
  int error_number = 0;
  std::vector<uint64_t> checksums;  // of the payloads of all slices; none if the outcome is bad
};

// Is the header of a slice the one that was asked for? Gives the payload's checksum that it names.
Outcome check_header(const Operation& operation, uint32_t index, uint64_t& checksum);

// Header and, if asked for, payload of a slice that is all there.
Outcome prove_slice(const Operation& operation, uint32_t index, bool verify_payload,
                    uint64_t& checksum);

// Puts the header of a slice in front of its payload.
void stamp_header(const Operation& operation, uint32_t index, uint64_t checksum);
// As above; computes the checksum if it is not known.
void stamp_slice(const Operation& operation, uint32_t index, bool is_known, uint64_t& checksum);

Outcome outcome_of_write(int error_number);

// Numbers of jobs, and results on their way to whoever waits. Called under the lock of its pool.
class Results {
 public:
  // The number of a new job: from 1 on.
  uint64_t begin_job(size_t operation_count);
  void put(Result result);
  // Gives the lock up while it waits, for `timeout_s` at most.
  std::vector<Result> take(Lock& lock, double timeout_s);

 private:
  std::vector<Result> done_;
  std::condition_variable has_some_;
  uint64_t last_job_ = 0;
  size_t out_count_ = 0;  // operations that have not ended
};

}  // namespace kvferry
