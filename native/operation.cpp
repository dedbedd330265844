#include "operation.h"

#include <algorithm>
#include <cerrno>

#include "checksum.h"

namespace kvferry {
namespace {

// While as much is out, who waits is woken for so many results and not for each.
constexpr size_t kResultsAtOnce = 6;

uint64_t payload_checksum(const Operation& operation, uint32_t index) {
  return checksum(operation.slice(index) + kHeaderBytes, operation.slice_bytes - kHeaderBytes);
}

}  // namespace

Outcome check_header(const Operation& operation, uint32_t index, uint64_t& checksum) {
  const SliceHeader& header = operation.header(index);
  checksum = header.payload_checksum;
  return verify(header, operation.page, operation.first_slice + index);
}

Outcome prove_slice(const Operation& operation, uint32_t index, bool verify_payload,
                    uint64_t& checksum) {
  const Outcome outcome = check_header(operation, index, checksum);
  if (outcome != Outcome::kOk || !verify_payload) return outcome;
  return payload_checksum(operation, index) == checksum ? Outcome::kOk : Outcome::kCorrupt;
}

void stamp_header(const Operation& operation, uint32_t index, uint64_t checksum) {
  stamp(operation.header(index), operation.page, operation.first_slice + index, checksum);
}

void stamp_slice(const Operation& operation, uint32_t index, bool is_known, uint64_t& checksum) {
  if (!is_known) checksum = payload_checksum(operation, index);
  stamp_header(operation, index, checksum);
}

Outcome outcome_of_write(int error_number) {
  const bool is_full = error_number == ENOSPC || error_number == EDQUOT;
  return is_full ? Outcome::kNoSpace : Outcome::kIoError;
}

uint64_t Results::begin_job(size_t operation_count) {
  out_count_ += operation_count;
  return ++last_job_;
}

void Results::put(Result result) {
  if (result.outcome != Outcome::kOk) result.checksums.clear();
  done_.push_back(std::move(result));
  --out_count_;
  if (done_.size() >= std::min(kResultsAtOnce, out_count_)) has_some_.notify_all();
}

std::vector<Result> Results::take(Lock& lock, double timeout_s) {
  has_some_.wait_until(lock, deadline_after(timeout_s), [this] { return !done_.empty(); });
  return std::exchange(done_, {});
}

}  // namespace kvferry
