// Python bindings: what comes in is checked here, the interpreter is let go of, and the work is
// done elsewhere. The manual is src/kvferry/_native.pyi.
#include <algorithm>
#include <cstring>

#include "bindings.h"
#include "block_map.h"
#include "chain_keys.h"
#include "checksum.h"
#include "copy_pool.h"
#include "io_pool.h"

using namespace kvferry;

namespace {

// Hashing so little takes less time than it may take to have the interpreter back.
constexpr size_t kShortBytes = 4096;
using LayerTuple = std::tuple<uint64_t, size_t, size_t, size_t, size_t, size_t, size_t>;
using PieceTuple = std::tuple<std::vector<int64_t>, uint64_t>;
std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

uint64_t checksum_at(uint64_t address, size_t length_bytes) {
  require(address % sizeof(uint64_t) == 0, "address must be a multiple of 8");
  require(length_bytes % kLaneBytes == 0, "length_bytes must be a multiple of 4096");
  const NoGil released;
  return checksum(reinterpret_cast<const void*>(address), length_bytes);
}

nb::bytes sha256_portable(const nb::bytes& data) {
  Sha256 hash(sha256_blocks_portable);
  hash.update(data.data(), data.size());
  const Digest digest = hash.finish();
  return nb::bytes(digest.data(), digest.size());
}

nb::bytes chain_keys_of(const nb::bytes& name_space, const nb::bytes& parent,
                        const nb::bytes& tokens, size_t chunk_tokens,
                        const std::vector<nb::bytes>& extras) {
  require(name_space.size() == sizeof(Digest), "namespace must have 32 bytes");
  require(parent.size() == sizeof(Digest), "parent must have 32 bytes");
  require(tokens.size() % sizeof(uint32_t) == 0, "tokens must have a multiple of 4 bytes");
  require(chunk_tokens > 0, "chunk_tokens must be positive");
  require(extras.size() == tokens.size() / sizeof(uint32_t) / chunk_tokens,
          "extras must have one entry for each full chunk");
  std::vector<std::string_view> extra_views;
  for (const nb::bytes& extra : extras) extra_views.push_back(view(extra));
  const std::string_view name_space_view = view(name_space);
  const std::string_view parent_view = view(parent);
  const std::string_view token_view = view(tokens);
  std::string keys;
  {
    std::optional<NoGil> released;
    if (tokens.size() > kShortBytes) released.emplace();
    keys = chain_keys(name_space_view, parent_view, token_view, chunk_tokens, extra_views);
  }
  return nb::bytes(keys.data(), keys.size());
}

void init_block_map(BlockMap* self, const std::vector<LayerTuple>& tuples, size_t head_count,
                    size_t header_bytes, size_t slice_bytes) {
  std::vector<Layer> layers;
  const auto to_layer = [](auto... fields) { return Layer{fields...}; };
  for (const LayerTuple& tuple : tuples) layers.push_back(std::apply(to_layer, tuple));
  new (self) BlockMap(std::move(layers), head_count, header_bytes, slice_bytes);
}

void check_gather(const std::vector<int64_t>& blocks) {
  const bool has_skip = std::any_of(blocks.begin(), blocks.end(), [](int64_t b) { return b < 0; });
  require(!has_skip, "a gather cannot skip a block");
}

void gather(const BlockMap& self, const std::vector<int64_t>& blocks, uint64_t address) {
  check_gather(blocks);
  self.check_fits(blocks.size());
  const NoGil released;
  self.gather(blocks, address);
}

void scatter(const BlockMap& self, const std::vector<int64_t>& blocks, uint64_t address) {
  self.check_fits(blocks.size());
  const NoGil released;
  self.scatter(blocks, address);
}

// What Python holds of a pool: its threads hold it as well, and stay when they hang.
class CopyPoolHandle {
 public:
  explicit CopyPoolHandle(size_t thread_count) {
    require(thread_count > 0, "thread_count must be positive");
    pool_->start(thread_count);
  }
  ~CopyPoolHandle() { pool_->close(); }

  uint64_t submit(const BlockMap& map, bool is_gather, std::vector<PieceTuple> tuples) {
    std::vector<Piece> pieces;
    for (auto& [blocks, address] : tuples) {
      if (is_gather) check_gather(blocks);
      pieces.push_back({std::move(blocks), address});
    }
    return pool_->submit(map, is_gather, std::move(pieces));
  }

  std::vector<uint64_t> poll() { return pool_->poll(); }

  bool finish(const std::vector<uint64_t>& numbers, double timeout_s) {
    const CopyPool::Jobs jobs(numbers.begin(), numbers.end());
    if (pool_->finish(jobs, 0)) return true;  // keeps the interpreter
    const NoGil released;
    return pool_->finish(jobs, timeout_s);
  }

  void close() {
    const NoGil released;
    pool_->close();
  }

 private:
  std::shared_ptr<CopyPool> pool_ = std::make_shared<CopyPool>();
};

class IoPoolHandle : public PagePoolHandle<IoPool> {
 public:
  IoPoolHandle(size_t read_thread_count, size_t write_thread_count)
      : PagePoolHandle(std::make_shared<IoPool>()) {
    require(read_thread_count > 0, "read_thread_count must be positive");
    require(write_thread_count > 0, "write_thread_count must be positive");
    pool_->start(read_thread_count, write_thread_count);
  }

  void limit_reads(size_t thread_count) {
    require(thread_count > 0, "thread_count must be positive");
    pool_->limit_reads(thread_count);
  }

  size_t reading_count() { return pool_->reading_count(); }
};

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a pool that hangs may outlive the interpreter
  m.def("checksum", checksum_at, nb::arg("address"), nb::arg("length_bytes"));
  m.def("sha256_portable", sha256_portable, nb::arg("data"));
  m.def("chain_keys", chain_keys_of, nb::arg("namespace"), nb::arg("parent"), nb::arg("tokens"),
        nb::arg("chunk_tokens"), nb::arg("extras"));

  bind_usrbio(m);

  nb::class_<BlockMap>(m, "BlockMap")
      .def("__init__", init_block_map, nb::arg("layers"), nb::arg("head_count"),
           nb::arg("header_bytes"), nb::arg("slice_bytes"))
      .def("gather", gather, nb::arg("blocks"), nb::arg("address"))
      .def("scatter", scatter, nb::arg("blocks"), nb::arg("address"));

  nb::class_<CopyPoolHandle>(m, "CopyPool")
      .def(nb::init<size_t>(), nb::arg("thread_count"))
      .def("submit", &CopyPoolHandle::submit, nb::arg("map"), nb::arg("is_gather"),
           nb::arg("pieces"))
      .def("poll", &CopyPoolHandle::poll)
      .def("finish", &CopyPoolHandle::finish, nb::arg("jobs"), nb::arg("timeout_s"))
      .def("close", &CopyPoolHandle::close);

  nb::class_<IoPoolHandle>(m, "IoPool")
      .def(nb::init<size_t, size_t>(), nb::arg("read_thread_count"),
           nb::arg("write_thread_count"))
      .def("submit_reads", &IoPoolHandle::submit_reads, nb::arg("operations"),
           nb::arg("verify_payload"))
      .def("submit_writes", &IoPoolHandle::submit_writes, nb::arg("operations"),
           nb::arg("checksums").none())
      .def("limit_reads", &IoPoolHandle::limit_reads, nb::arg("thread_count"))
      .def_prop_ro("reading_count", &IoPoolHandle::reading_count)
      .def("poll", &IoPoolHandle::poll)
      .def("wait", &IoPoolHandle::wait, nb::arg("timeout_s"))
      .def("close", &IoPoolHandle::close, nb::arg("timeout_s"));
}
