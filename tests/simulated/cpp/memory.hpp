// The memory of one card as torch manages it: what is reserved is not what is allocated, and a freed block waits for
// its like. After c10/cuda/CUDACachingAllocator.cpp (torch 2.13): blocks of 512 B; requests up to 1 MiB share segments
// of 2 MiB, those under 10 MiB segments of 20 MiB, larger ones get their own, rounded to 2 MiB; best fit, split, merged
// with free neighbours. Graphs allocate from pools of their own, which count their users; while a capture is under way,
// as the allocator believes, no other memory goes back to the driver.

#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

using Region = std::pair<int64_t, int64_t>;  // address and bytes; in order of size: bytes and address

constexpr int64_t BLOCK = 512, SMALL = 1 << 20, SMALL_SEGMENT = 2 << 20;
constexpr int64_t LARGE = 10 << 20, LARGE_SEGMENT = 20 << 20, ROUND = 2 << 20;

int64_t rounded(int64_t nbytes, int64_t by) { return (nbytes + by - 1) / by * by; }

using PoolId = std::pair<int64_t, int64_t>;  // as graphs and torch.cuda.MemPool have it

struct Pool {
  bool is_private = false;  // of graphs and of MemPool
  int64_t users = 0, segments = 0, reserved = 0;
};

using Shelf = std::pair<std::shared_ptr<Pool>, bool>;  // whose blocks, and whether small ones

struct Block {
  int64_t address, nbytes;
  Shelf shelf;
  bool free = true;
  Block *before = nullptr, *after = nullptr;
};

struct Allocator {
  int64_t total_bytes, taken_bytes;
  int64_t allocated = 0, reserved = 0, peak_allocated = 0;
  int64_t next_address = int64_t(1) << 40;
  std::map<int64_t, int64_t> unmapped;  // segments that the driver has back: address and bytes; none is used again
  std::map<Shelf, std::map<Region, Block*>> free_blocks;  // by bytes, then address
  py::object on_allocate = py::none();  // called with the bytes before each allocation; what it raises ends that
  std::map<PoolId, std::shared_ptr<Pool>> private_pools;
  std::vector<PoolId> captures_underway;

  Allocator(int64_t total, int64_t taken) : total_bytes(total), taken_bytes(taken) {}

  ~Allocator() {  // by the last tensor, which torch may free without Python's lock
    py::gil_scoped_acquire held;
    on_allocate = py::object();
  }

  int64_t driver_free() const { return total_bytes - taken_bytes - reserved; }

  Block* allocate(int64_t nbytes, const std::shared_ptr<Pool>& pool) {
    if (!on_allocate.is_none()) {
      py::gil_scoped_acquire held;
      on_allocate(nbytes);
    }
    int64_t size = std::max(BLOCK, rounded(nbytes, BLOCK));
    Shelf shelf{pool, size <= SMALL};
    Block* block = cached(shelf, size);
    if (block == nullptr) block = segment(shelf, size);
    if (block == nullptr && captures_underway.empty()) {
      release();
      block = segment(shelf, size);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, block != nullptr, "CUDA out of memory. Tried to allocate ",
        c10::str(std::fixed, std::setprecision(2), nbytes / 1048576.0), " MiB. GPU 0 has a total capacity of ",
        c10::str(std::fixed, std::setprecision(2), total_bytes / 1073741824.0), " GiB of which ",
        c10::str(std::fixed, std::setprecision(2), driver_free() / 1048576.0), " MiB is free.");
    split(block, size);
    block->free = false;
    allocated += block->nbytes;
    peak_allocated = std::max(peak_allocated, allocated);
    return block;
  }

  void free(Block* block) {
    allocated -= block->nbytes;
    block->free = true;
    if (Block* before = block->before; before != nullptr && before->free) {
      take(before);
      block->address = before->address;
      block->nbytes += before->nbytes;
      block->before = before->before;
      if (block->before != nullptr) block->before->after = block;
      delete before;
    }
    if (Block* after = block->after; after != nullptr && after->free) {
      take(after);
      block->nbytes += after->nbytes;
      block->after = after->after;
      if (block->after != nullptr) block->after->before = block;
      delete after;
    }
    give(block);
  }

  bool mapped(int64_t address) const {
    auto after = unmapped.upper_bound(address);
    return after == unmapped.begin() || std::prev(after)->first + std::prev(after)->second <= address;
  }

  // Hand segments that are wholly free to the driver (release_cached_blocks): those of a private pool once nobody uses
  // it, all others only while no capture is under way; with an id those of this pool only.
  void release(const std::optional<PoolId>& id = std::nullopt) {
    if (id && !private_pools.contains(*id)) return;
    for (auto& [shelf, blocks] : free_blocks) {
      Pool& pool = *shelf.first;
      if (id && shelf.first != private_pools.at(*id)) continue;
      if (pool.is_private ? pool.users > 0 : !captures_underway.empty()) continue;
      for (auto each = blocks.begin(); each != blocks.end();) {
        Block* block = each->second;
        if (block->before == nullptr && block->after == nullptr) {
          reserved -= block->nbytes;
          pool.reserved -= block->nbytes;
          unmapped[block->address] = block->nbytes;
          pool.segments -= 1;
          delete block;
          each = blocks.erase(each);
        } else {
          ++each;
        }
      }
    }
    std::erase_if(private_pools, [](const auto& each) { return each.second->users == 0 && each.second->segments == 0; });
  }

  // One more user of a private pool (create_or_incref_pool).
  std::shared_ptr<Pool> share(const PoolId& id) {
    auto found = private_pools.find(id);
    if (found == private_pools.end()) found = private_pools.emplace(id, std::make_shared<Pool>(Pool{true})).first;
    else TORCH_INTERNAL_ASSERT(found->second->users > 0);
    found->second->users += 1;
    return found->second;
  }

  // A capture begins that allocates from this pool (beginAllocateToPool).
  std::shared_ptr<Pool> begin_capture(const PoolId& id) {
    auto pool = share(id);
    TORCH_CHECK(capture(id) == captures_underway.end(), "beginAllocateToPool: already recording to mempool_id");
    captures_underway.push_back(id);
    return pool;
  }

  void end_capture(const PoolId& id) {  // endAllocateToPool
    auto found = capture(id);
    TORCH_CHECK(found != captures_underway.end(), "endAllocatePool: not currently recording to mempool_id");
    captures_underway.erase(found);
  }

  void release_pool(const PoolId& id) {  // one user less (releasePool)
    auto found = private_pools.find(id);
    TORCH_INTERNAL_ASSERT(found != private_pools.end() && found->second->users > 0);
    found->second->users -= 1;
  }

  int64_t users(const PoolId& id) const {
    auto found = private_pools.find(id);
    return found == private_pools.end() ? 0 : found->second->users;
  }

 private:
  std::vector<PoolId>::iterator capture(const PoolId& id) {
    return std::find(captures_underway.begin(), captures_underway.end(), id);
  }

  Block* cached(const Shelf& shelf, int64_t size) {
    auto& blocks = free_blocks[shelf];
    auto found = blocks.lower_bound({size, 0});
    if (found == blocks.end()) return nullptr;
    Block* block = found->second;
    blocks.erase(found);
    return block;
  }

  Block* segment(const Shelf& shelf, int64_t size) {
    int64_t nbytes = shelf.second ? SMALL_SEGMENT : size < LARGE ? LARGE_SEGMENT : rounded(size, ROUND);
    if (nbytes > driver_free()) return nullptr;
    reserved += nbytes;
    shelf.first->reserved += nbytes;
    shelf.first->segments += 1;
    auto* block = new Block{next_address, nbytes, shelf};
    next_address += nbytes + ROUND;
    return block;
  }

  void split(Block* block, int64_t size) {
    int64_t rest = block->nbytes - size;
    if (rest < (block->shelf.second ? BLOCK : SMALL + 1)) return;
    auto* tail = new Block{block->address + size, rest, block->shelf};
    tail->before = block;
    tail->after = block->after;
    if (block->after != nullptr) block->after->before = tail;
    block->after = tail;
    block->nbytes = size;
    give(tail);
  }

  void give(Block* block) { free_blocks[block->shelf][{block->nbytes, block->address}] = block; }
  void take(Block* block) { free_blocks[block->shelf].erase({block->nbytes, block->address}); }
};
