// What the bindings share: operations and results of pools, from and to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "operation.h"

namespace kvferry {

namespace nb = nanobind;

using NoGil = nb::gil_scoped_release;
using OperationTuple =
    std::tuple<int, int64_t, uint64_t, uint32_t, uint32_t, size_t, size_t, nb::bytes>;
using ResultTuple = std::tuple<uint64_t, size_t, int, int, nb::tuple>;


inline void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

std::vector<Operation> to_operations(const std::vector<OperationTuple>& tuples);
void require_checksums(const std::vector<Operation>& operations,
                       const std::optional<std::vector<uint64_t>>& checksums);
std::vector<ResultTuple> to_tuples(const std::vector<Result>& results);

// What Python holds of a pool that moves pages: its threads hold it too, and stay when they hang.
template <class Pool>
class PagePoolHandle {
 public:
  explicit PagePoolHandle(std::shared_ptr<Pool> pool = nullptr) : pool_(std::move(pool)) {}
  ~PagePoolHandle() {
    if (pool_) pool_->close(0);
  }

  uint64_t submit_reads(const std::vector<OperationTuple>& operations, bool verify_payload) {
    return pool_->submit_reads(to_operations(operations), verify_payload);
  }

  uint64_t submit_writes(const std::vector<OperationTuple>& tuples,
                         const std::optional<std::vector<uint64_t>>& checksums) {
    const std::vector<Operation> operations = to_operations(tuples);
    require_checksums(operations, checksums);
    return pool_->submit_writes(operations, checksums.value_or(std::vector<uint64_t>()));
  }

  std::vector<ResultTuple> poll() { return to_tuples(pool_->wait(0)); }

  std::vector<ResultTuple> wait(double timeout_s) {
    std::vector<Result> results = pool_->wait(0);  // keeps the interpreter
    if (results.empty()) {
      const NoGil released;
      results = pool_->wait(timeout_s);
    }
    return to_tuples(results);
  }

  bool close(double timeout_s) {
    const NoGil released;
    return pool_->close(timeout_s);
  }

 protected:
  std::shared_ptr<Pool> pool_;
};

// The class UsrbioPool.
void bind_usrbio(nb::module_& m);

}  // namespace kvferry
