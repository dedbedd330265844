// What the bindings share: operations and results of pools, from and to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
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

// The class UsrbioPool.
void bind_usrbio(nb::module_& m);

}  // namespace kvferry
