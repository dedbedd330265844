#include "hf3fs.h"

#include <dlfcn.h>

#include <stdexcept>

namespace kvferry {
namespace {

template <class Function>
void find(void* library, const char* name, Function& function) {
  void* found = ::dlsym(library, name);
  if (!found) throw std::runtime_error(std::string("it has no function ") + name);
  function = reinterpret_cast<Function>(found);
}

}  // namespace

Hf3fs Hf3fs::load(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(::dlerror());
  Hf3fs functions;
  find(library, "hf3fs_extract_mount_point", functions.extract_mount_point);
  find(library, "hf3fs_iovwrap", functions.iovwrap);
  find(library, "hf3fs_iorcreate4", functions.iorcreate4);
  find(library, "hf3fs_iordestroy", functions.iordestroy);
  find(library, "hf3fs_reg_fd", functions.reg_fd);
  find(library, "hf3fs_dereg_fd", functions.dereg_fd);
  find(library, "hf3fs_prep_io", functions.prep_io);
  find(library, "hf3fs_submit_ios", functions.submit_ios);
  find(library, "hf3fs_wait_for_ios", functions.wait_for_ios);
  find(library, "hf3fs_punchhole", functions.punchhole);
  return functions;
}

}  // namespace kvferry
