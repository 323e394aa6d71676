// Shared memory in which the ranks of one machine sum their gradients, and the threads that sum.
//
// Each rank writes its gradients to its slot, and posts them chunk by chunk. When all ranks have
// posted a chunk, threads of all ranks sum its blocks. The two results are used in turn.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "layout.hpp"
#include "mapping.hpp"

namespace paceline {

// Values that are contiguous in memory, at the same offset in the slot of each rank.
struct Segment {
    std::size_t offset;  // bytes
    std::size_t count;
    DType dtype;
};

// Segments that are posted together, divided into blocks; one thread sums a block. Block i has the
// segments first[i] to first[i + 1] - 1. `streaming`: the sums are stored past the caches.
struct Chunk {
    std::vector<Segment> segments;
    std::vector<std::size_t> first;
    std::size_t nbytes;
    bool streaming;

    std::uint32_t num_blocks() const { return static_cast<std::uint32_t>(first.size() - 1); }
};

Chunk cut(const std::vector<Segment>& segments, std::size_t num_ranks);

enum class Goal { chunk, step, drained };
enum class Status { reached, pending, discarded, lost };
// The operation that a rank has not done, or `died`.
enum class Fault : std::uint32_t { none, died, post, sum, publish, drain };

// One rank's access to the shared memory. One thread may call `wait` or `publish` while another
// calls `post`. After `drain`, these calls have no effect until the next step. Call `begin` and
// `set_chunks` only while no other thread uses the arena.
class Arena {
public:
    struct Options {
        double scale;
        bool held;        // a step is complete only after `publish` was called for each chunk
        bool own_core;    // each rank has its own core, so a rank that spins disturbs no other rank
        bool spare_core;  // the reducer thread has another core than the rank's waiting thread
    };

    // `shared`: the whole file; `results`: a copy-on-write mapping of the two results in this file.
    Arena(std::shared_ptr<Mapping> shared, std::shared_ptr<Mapping> results, std::size_t rank,
          const Layout& layout, Options options);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    const Layout& layout() const { return layout_; }
    const std::shared_ptr<Mapping>& shared() const { return shared_; }
    const std::shared_ptr<Mapping>& results() const { return results_; }
    char* slot(std::size_t rank) const;
    char* result(std::size_t parity) const;

    void set_chunks(std::vector<Chunk> chunks);
    std::size_t num_chunks() const { return chunks_.size(); }
    void begin(std::uint32_t step);
    void post(std::size_t chunk);
    void publish();  // count one more chunk as summed over all machines
    void commit();

    // Sum blocks, or sleep, until the goal is reached. Status::pending: after 50 ms or a signal.
    Status wait(Goal goal, std::uint32_t step, std::size_t chunk);

    // Discard the step on all ranks. Then call `drain`, and wait for Goal::drained.
    void discard();
    // Stop summing in this step, and count this rank as drained.
    void drain();
    bool is_discarded(std::uint32_t step) const;
    std::size_t discarded_by() const;

    // The ranks for which a goal is not reached, with the operation that each rank has not done.
    std::vector<std::pair<std::size_t, Fault>> missing(Goal goal, std::uint32_t step,
                                                       std::size_t chunk) const;
    void give_up(std::size_t rank, Fault fault);
    std::vector<std::pair<std::size_t, Fault>> lost() const;

    // The time when the last rank posted the chunk, and the time when its sum was complete, in ns.
    std::pair<std::int64_t, std::int64_t> times(std::size_t chunk) const;

private:
    template <class T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(shared_->data() + offset);
    }
    std::atomic<std::uint32_t>& posted(std::size_t chunk, std::size_t rank) const {
        return at<std::atomic<std::uint32_t>>(layout_.posted)[chunk * layout_.num_ranks + rank];
    }
    bool reached(Goal goal, std::uint32_t step, std::size_t chunk) const;
    void open(std::size_t chunk);
    void complete(std::size_t chunk);
    bool sum_one_block();
    bool claim(std::size_t& chunk, std::uint32_t& block);
    bool take(std::size_t chunk, std::uint32_t& block);
    void sum_block(const Chunk& chunk, std::uint32_t block);
    void notify(std::uint32_t at_most);
    void call_reducers(std::uint32_t at_most);
    void reduce();

    const Layout layout_;
    const std::size_t rank_;
    const Options options_;
    const Kernels& kernels_;
    const int pid_;
    const std::shared_ptr<Mapping> shared_;
    const std::shared_ptr<Mapping> results_;
    Header& header_;
    RankState* const ranks_;
    ChunkState* const chunk_states_;
    Tagged* const order_;  // (step, chunk) in the order in which chunks were posted by all ranks

    // Locked shared while a block is claimed and summed; exclusively to change three members below.
    std::shared_mutex gate_;
    std::vector<Chunk> chunks_;
    std::uint32_t step_ = 0;  // 0 while nothing may be summed
    Tagged next_{0};          // index in `order_` of the first chunk with unclaimed blocks

    std::atomic<std::uint32_t> num_posted_{0};
    std::atomic<std::uint32_t> num_waiting_{0};  // threads of this rank that are in `wait`
    std::atomic<bool> reducing_{false};          // the reducer thread may be summing a block
    std::atomic<bool> closing_{false};
    std::unique_ptr<std::thread> thread_;
};

}  // namespace paceline
