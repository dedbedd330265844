// Bindings of UsrbioPool, as those in module.cpp.
#include <fcntl.h>

#include <cerrno>

#include "bindings.h"
#include "usrbio_pool.h"

namespace kvferry {
namespace {

constexpr size_t kIdBytes = 16;

void require_success(int error_number) {
  if (error_number == 0) return;
  errno = error_number;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

class UsrbioPoolHandle : public PagePoolHandle<UsrbioPool> {
 public:
  UsrbioPoolHandle(const Hf3fs& library, const std::string& mount_point, size_t read_thread_count,
                   size_t write_thread_count, int entry_max, size_t ring_bytes_max,
                   size_t io_bytes_max, double io_deadline_s, double ring_deadline_s) {
    require(read_thread_count > 0, "read_thread_count must be positive");
    require(write_thread_count > 0, "write_thread_count must be positive");
    require(entry_max > 0, "entry_max must be positive");
    require(ring_bytes_max > 0, "ring_bytes_max must be positive");
    require(io_bytes_max > 0 && io_bytes_max % kHeaderBytes == 0,
            "io_bytes_max must be a multiple of 4096");
    const UsrbioSettings settings{mount_point, entry_max, ring_bytes_max, io_bytes_max,
                                  io_deadline_s, ring_deadline_s};
    pool_ = std::make_shared<UsrbioPool>(library, settings);
    int error;
    {
      const NoGil released;
      error = pool_->start(read_thread_count, write_thread_count);
    }
    require_success(error);
  }

  void add_memory(uint64_t address, size_t length_bytes, const nb::bytes& id) {
    require(id.size() == kIdBytes, "id must have 16 bytes");
    require_success(pool_->add_memory(address, length_bytes, id.c_str()));
  }

  void remove_memory(uint64_t address) { pool_->remove_memory(address); }

  uint64_t overdue_count() const { return pool_->overdue_count(); }
  uint64_t overdue_now_count() const { return pool_->overdue_now_count(); }

};

// None: not on a mount of this library.
std::optional<std::string> mount_point(const Hf3fs& library, const std::string& path) {
  char found[256];
  const NoGil released;
  const int length = library.extract_mount_point(found, sizeof found, path.c_str());
  if (length <= 0 || static_cast<size_t>(length) > sizeof found) return std::nullopt;
  return std::string(found);
}

void register_file(const Hf3fs& library, int descriptor) {
  int result;
  {
    const NoGil released;
    result = library.reg_fd(descriptor, 0);
  }
  require_success(result > 0 ? result : 0);
  if (result < 0) ::fcntl(-result, F_SETFD, FD_CLOEXEC);  // the library's own duplicate
}

void deregister_file(const Hf3fs& library, int descriptor) {
  const NoGil released;
  library.dereg_fd(descriptor);
}

void punch_hole(const Hf3fs& library, int descriptor, size_t start, size_t end) {
  int result;
  {
    const NoGil released;
    result = library.punchhole(descriptor, 1, &start, &end, 0);
  }
  require_success(result < 0 ? -result : result);
}

}  // namespace

void bind_usrbio(nb::module_& m) {
  nb::class_<Hf3fs>(m, "Hf3fs")
      .def_static("load", &Hf3fs::load, nb::arg("path"))
      .def("mount_point", mount_point, nb::arg("path"))
      .def("register_file", register_file, nb::arg("descriptor"))
      .def("deregister_file", deregister_file, nb::arg("descriptor"))
      .def("punch_hole", punch_hole, nb::arg("descriptor"), nb::arg("start"), nb::arg("end"));

  nb::class_<UsrbioPoolHandle>(m, "UsrbioPool")
      .def(nb::init<const Hf3fs&, const std::string&, size_t, size_t, int, size_t, size_t, double,
                    double>(),
           nb::arg("library"), nb::arg("mount_point"), nb::arg("read_thread_count"),
           nb::arg("write_thread_count"), nb::arg("entry_max"), nb::arg("ring_bytes_max"),
           nb::arg("io_bytes_max"), nb::arg("io_deadline_s"),
           nb::arg("ring_deadline_s"))
      .def("add_memory", &UsrbioPoolHandle::add_memory, nb::arg("address"),
           nb::arg("length_bytes"), nb::arg("id"))
      .def("remove_memory", &UsrbioPoolHandle::remove_memory, nb::arg("address"))
      .def("submit_reads", &UsrbioPoolHandle::submit_reads, nb::arg("operations"),
           nb::arg("verify_payload"))
      .def("submit_writes", &UsrbioPoolHandle::submit_writes, nb::arg("operations"),
           nb::arg("checksums").none())
      .def("poll", &UsrbioPoolHandle::poll)
      .def("wait", &UsrbioPoolHandle::wait, nb::arg("timeout_s"))
      .def("close", &UsrbioPoolHandle::close, nb::arg("timeout_s"))
      .def_prop_ro("overdue_count", &UsrbioPoolHandle::overdue_count)
      .def_prop_ro("overdue_now_count", &UsrbioPoolHandle::overdue_now_count);
}

}  // namespace kvferry
