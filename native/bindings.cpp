#include "bindings.h"

#include <cstring>

namespace kvferry {
namespace {

Operation to_operation(const OperationTuple& tuple) {
  Operation operation{};
  size_t payload_bytes;
  nb::bytes header;
  std::tie(operation.descriptor, operation.offset_bytes, operation.buffer_address,
           operation.first_slice, operation.slice_count, operation.slice_bytes, payload_bytes,
           header) = tuple;
  require(operation.offset_bytes >= 0 && operation.offset_bytes % kHeaderBytes == 0,
          "offset_bytes must be a multiple of 4096");
  require(operation.buffer_address % kHeaderBytes == 0,
          "buffer_address must be a multiple of 4096");
  require(operation.slice_count > 0, "slice_count must be positive");
  require(payload_bytes > 0 && operation.slice_bytes % kHeaderBytes == 0 &&
              (payload_bytes - 1) / kHeaderBytes + 2 == operation.slice_bytes / kHeaderBytes,
          "slice_bytes must be 4096 and payload_bytes, rounded up to a multiple of 4096");
  require(header.size() >= kHeaderUsedBytes && header.size() <= kHeaderBytes,
          "header must have 256 to 4096 bytes");
  std::memcpy(&operation.page, header.data(), header.size());
  require(operation.page.payload_bytes == payload_bytes, "payload_bytes is not the header's");
  require(operation.page.slice_count >= operation.slice_count &&
              operation.page.slice_count - operation.slice_count >= operation.first_slice,
          "first_slice and slice_count exceed the header's slice count");
  return operation;
}

}  // namespace

std::vector<Operation> to_operations(const std::vector<OperationTuple>& tuples) {
  std::vector<Operation> operations;
  for (const OperationTuple& tuple : tuples) operations.push_back(to_operation(tuple));
  return operations;
}

std::vector<ResultTuple> to_tuples(const std::vector<Result>& results) {
  std::vector<ResultTuple> tuples;
  for (const Result& result : results) {
    tuples.emplace_back(result.job, result.index, static_cast<int>(result.outcome),
                        result.error_number, nb::tuple(nb::cast(result.checksums)));
  }
  return tuples;
}

void require_checksums(const std::vector<Operation>& operations,
                       const std::optional<std::vector<uint64_t>>& checksums) {
  size_t slice_count = 0;
  for (const Operation& operation : operations) slice_count += operation.slice_count;
  require(!checksums || checksums->size() == slice_count,
          "checksums must have one entry for each slice of each operation");
}

}  // namespace kvferry
