// One card and its host: work in order, a launch queue that fills, an L2, a clock, and how long each kernel takes.

#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.hpp"

constexpr size_t QUEUE = 1024;  // launches that a card takes before the host waits (CUDA's undocumented depth)
constexpr size_t SPANS = 64;
constexpr double LULL_S = 1e-4;  // kernels that follow each other closer than this are one span of being busy

using Name = const std::string*;

Name interned(const std::string& name) {
  static auto& names = *new std::set<std::string>;
  return &*names.insert(name).first;
}

struct Host {
  double now_s = 1000.0;
  int64_t operators = 0;
  double wake_s = std::numeric_limits<double>::infinity();
  py::object wake;

  void wait_until(double moment_s) {
    if (moment_s >= wake_s) {
      py::gil_scoped_acquire held;
      wake(moment_s);
    }
    now_s = std::max(now_s, moment_s);
  }
  void advance(double seconds) { wait_until(now_s + seconds); }
};

struct Work {
  Name name;
  std::vector<Region> reads, writes;
  double flops;
  Name dtype;     // of a matmul's operands
  double link_s;  // over a link, for a copy from elsewhere
  std::optional<Region> workspace = std::nullopt;  // cuBLAS's, written if the matmul is split
};

// What lowers the clock: so many busy seconds for good, or so many seconds of arithmetic, which draw all the power that
// the card may take; as many of other work or of rest let it rise again. A power limit may first let it fall further,
// and settle in a time constant.
struct Clock {
  double after_busy_s, busy_share, after_computing_s, capped_share, dip_share, settles_s;
  double busy_s = 0.0, computing_s = 0.0, end_s = 0.0, capped_since_s = 0.0;
  bool capped = false;
  std::deque<std::pair<double, double>> changes;  // from when, and to which share of the rated clock

  // For the next kernel.
  double share() const { return (busy_s >= after_busy_s ? busy_share : 1.0) * (capped ? settled_share() : 1.0); }

  double share_at(double moment_s) const {
    for (auto each = changes.rbegin(); each != changes.rend(); ++each)
      if (each->first <= moment_s) return each->second;
    return 1.0;
  }

  void run(double start_s, double seconds, bool computes) {
    double before = share();
    heat(end_s - start_s);
    heat(computes ? seconds : -seconds);
    busy_s += seconds;
    end_s = start_s + seconds;
    if (share() != before) changes.emplace_back(end_s, share());
  }

 private:
  double settled_share() const {
    if (settles_s == 0.0) return capped_share;
    return capped_share - (capped_share - dip_share) * std::exp(-(end_s - capped_since_s) / settles_s);
  }

  void heat(double seconds) {
    computing_s = std::clamp(computing_s + seconds, 0.0, after_computing_s);
    if (computing_s == after_computing_s && !capped) {
      capped = true;
      capped_since_s = end_s;
    }
    if (computing_s == 0.0) capped = false;
  }
};

struct Speeds {
  double bytes_per_s, l2_bytes_per_s, smallest_kernel_s, launch_s, graph_launch_s, host_operator_s;
  std::map<std::string, double> flops_per_s;
  std::vector<std::pair<std::string, double>> kernel_share;

  // max(bytes / bandwidth, FLOPs / peak), or the smallest kernel, or what a link takes.
  double duration_s(
      const std::string& name, int64_t memory_bytes, int64_t l2_bytes, double flops, const std::string& dtype,
      double link_s, double clock_share) const {
    double moving = moving_s(memory_bytes, l2_bytes, clock_share);
    double computing = computing_s(flops, dtype, clock_share);
    double share = 1.0;
    for (const auto& [part, reached] : kernel_share)
      if (name.find(part) != std::string::npos) {
        share = reached;
        break;
      }
    return std::max({std::max(moving, computing) / share, link_s, smallest_kernel_s});
  }

  double moving_s(int64_t memory_bytes, int64_t l2_bytes, double clock_share) const {
    return memory_bytes / bytes_per_s + l2_bytes / (l2_bytes_per_s * clock_share);
  }

  double computing_s(double flops, const std::string& dtype, double clock_share) const {
    return flops != 0.0 ? flops / (flops_per_s.at(dtype) * clock_share) : 0.0;
  }
};

struct Traffic {
  int64_t memory_bytes = 0, l2_bytes = 0;
};

// The L2: what was touched last, up to its size; whoever is larger than it streams through. Of one that writes back, a
// write that is larger leaves its end there, until other data takes its place and waits for it.
struct Cache {
  int64_t nbytes, total = 0;
  bool writes_back;
  int64_t dirty = 0;  // bytes that have yet to be written to memory; they leave before all others
  std::list<Region> order;
  struct Hash {
    size_t operator()(const Region& region) const { return region.first * 31 + region.second; }
  };
  std::unordered_map<Region, std::list<Region>::iterator, Hash> held;

  Cache(int64_t size, bool back) : nbytes(size), writes_back(back) {}

  Traffic read(const Region& region) {
    if (touch(region)) return {0, region.second};
    return {region.second + make_room(region), 0};
  }

  Traffic write(const Region& region) {
    if (touch(region)) return {0, region.second};
    int64_t written_back = make_room(region);
    if (region.second <= nbytes) return {written_back, region.second};
    total = dirty = writes_back ? nbytes : 0;
    return {written_back + region.second - dirty, 0};
  }

 private:
  bool touch(const Region& region) {
    auto found = held.find(region);
    if (found == held.end()) return false;
    order.splice(order.end(), order, found->second);
    return true;
  }

  // Bytes that are written back for a region, which is there afterwards if it can be.
  int64_t make_room(const Region& region) {
    if (region.second > nbytes) {
      held.clear();
      order.clear();
      total = 0;
      return std::exchange(dirty, 0);
    }
    held[region] = order.insert(order.end(), region);
    total += region.second;
    int64_t written_back = std::clamp<int64_t>(total - nbytes, 0, dirty);
    dirty -= written_back;
    total -= written_back;
    while (total > nbytes) {
      auto victim = order.begin();
      total -= victim->second;
      held.erase(*victim);
      order.erase(victim);
    }
    return written_back;
  }
};

struct Values {  // what memory holds everywhere, where that is known, until a kernel writes it
  std::map<int64_t, std::pair<int64_t, double>> by_address;  // bytes and value

  void forget(const Region& region) {
    if (by_address.empty()) return;
    auto each = by_address.lower_bound(region.first);
    if (each != by_address.begin() && std::prev(each)->first + std::prev(each)->second.first > region.first) --each;
    while (each != by_address.end() && each->first < region.first + region.second) each = by_address.erase(each);
  }

  void set(const Region& region, double value) {
    forget(region);
    by_address[region.first] = {region.second, value};
  }

  std::optional<double> get(const Region& region) const {
    auto after = by_address.upper_bound(region.first);
    if (after == by_address.begin()) return std::nullopt;
    const auto& [address, found] = *std::prev(after);
    if (address + found.first < region.first + region.second) return std::nullopt;
    return found.second;
  }
};

struct Recording {  // of a graph
  std::vector<Work> works;
  bool invalid = false;
  std::shared_ptr<Pool> pool;  // that it allocates from
};

struct Queue {  // of a stream
  double ready_s = 0.0;  // when its last work ends
  Recording* capture = nullptr;
  std::deque<double> ends;
  std::shared_ptr<Pool> pool = std::make_shared<Pool>();
  Block* workspace = nullptr;  // cuBLAS's, one per stream

  // Send work that takes the host and the stream so long; gives its start.
  double submit(Host& host, double duration_s, double host_s) {
    host.advance(host_s);
    while (!ends.empty() && ends.front() <= host.now_s) ends.pop_front();
    if (ends.size() >= QUEUE) {
      double end_s = ends.front();
      ends.pop_front();
      host.wait_until(end_s);
    }
    double start_s = std::max(host.now_s, ready_s);
    ready_s = start_s + duration_s;
    ends.push_back(ready_s);
    return start_s;
  }
};

struct Kernel {
  const Work* work;
  int64_t memory_bytes = 0, l2_bytes = 0;
  bool launched;
  double duration_s = 0.0;
  bool computes = false;  // it takes its time for arithmetic
};

struct Card {
  int64_t index;
  Host& host;
  Speeds speeds;
  Clock clock;
  int64_t workspace_bytes;
  Cache cache;
  Values values;
  std::shared_ptr<Allocator> memory;
  Queue* queue = nullptr;  // the current one
  bool generator_captures = false;  // as torch's default generator of this card believes
  std::deque<std::pair<double, double>> spans;  // start and end of what kept it busy lately
  int64_t memory_bytes = 0;  // that its kernels moved
  double computing_s = 0.0;  // in which its kernels' time was that of their arithmetic
  py::object on_kernel = py::none();
  int64_t operators_before = 0;

  Card(int64_t at, Host& on, Speeds fast, Clock ticks, int64_t workspace, Cache l2, std::shared_ptr<Allocator> held)
      : index(at), host(on), speeds(std::move(fast)), clock(std::move(ticks)), workspace_bytes(workspace),
        cache(std::move(l2)), memory(std::move(held)) {}

  // Send one kernel to the current stream, or into what it captures.
  void launch(Work work) {
    if (queue->capture != nullptr) {
      host.advance(speeds.launch_s);
      queue->capture->works.push_back(std::move(work));
      return;
    }
    Kernel kernel = run(work, true);
    submit({&kernel, 1}, speeds.launch_s);
  }

  // Send recorded kernels to the current stream as one launch.
  void replay(const Recording& recording) {
    std::vector<Kernel> kernels;
    kernels.reserve(recording.works.size());
    for (const Work& work : recording.works) kernels.push_back(run(work, kernels.empty()));
    if (kernels.empty())
      host.advance(speeds.graph_launch_s);
    else
      submit(kernels, speeds.graph_launch_s);
  }

  // cuBLAS's workspace of the current stream; a capture allocates it in its own pool (getCUDABlasLtWorkspace).
  Region workspace() {
    if (queue->workspace == nullptr)
      queue->workspace = memory->allocate(workspace_bytes, queue->capture ? queue->capture->pool : queue->pool);
    return {queue->workspace->address, workspace_bytes};
  }

  // Share of the last seconds in which any kernel ran.
  double active_share(double window_s) const {
    double busy = 0.0;
    for (const auto& [start, end] : spans)
      busy += std::max(0.0, std::min(end, host.now_s) - std::max(start, host.now_s - window_s));
    return std::min(1.0, busy / window_s);
  }

 private:
  // What a kernel takes now, with what the cache holds.
  Kernel run(const Work& work, bool launched) {
    Kernel kernel{&work, 0, 0, launched};
    auto add = [&](const Traffic& traffic) {
      kernel.memory_bytes += traffic.memory_bytes;
      kernel.l2_bytes += traffic.l2_bytes;
    };
    for (const Region& region : work.reads) add(cache.read(region));
    for (const Region& region : work.writes) {
      add(cache.write(region));
      values.forget(region);
    }
    TORCH_CHECK(
        !work.workspace || memory->mapped(work.workspace->first),
        "CUDA error: an illegal memory access was encountered");
    double share = clock.share();
    kernel.duration_s = speeds.duration_s(
        *work.name, kernel.memory_bytes, kernel.l2_bytes, work.flops, *work.dtype, work.link_s, share);
    kernel.computes = speeds.computing_s(work.flops, *work.dtype, share) >
        speeds.moving_s(kernel.memory_bytes, kernel.l2_bytes, share);
    return kernel;
  }

  void submit(c10::ArrayRef<Kernel> kernels, double host_s) {
    double seconds = 0.0;
    for (const Kernel& kernel : kernels) seconds += kernel.duration_s;
    double start_s = queue->submit(host, seconds, host_s);
    double end_s = start_s;
    for (const Kernel& kernel : kernels) {
      clock.run(end_s, kernel.duration_s, kernel.computes);
      end_s += kernel.duration_s;
      memory_bytes += kernel.memory_bytes;
      if (kernel.computes) computing_s += kernel.duration_s;
    }
    if (!spans.empty() && start_s - spans.back().second < LULL_S) {
      spans.back().second = start_s + seconds;
    } else {
      spans.emplace_back(start_s, start_s + seconds);
      if (spans.size() > SPANS) spans.pop_front();
    }
    int64_t operators = host.operators - operators_before;
    operators_before = host.operators;
    if (on_kernel.is_none()) return;
    py::gil_scoped_acquire held;
    for (const Kernel& kernel : kernels) {
      const Work& work = *kernel.work;
      on_kernel(
          *work.name, work.reads, work.writes, work.flops, *work.dtype, work.link_s, kernel.memory_bytes,
          kernel.l2_bytes, kernel.launched, operators, kernel.duration_s, start_s);
      start_s += kernel.duration_s;
      operators = 0;
    }
  }
};
