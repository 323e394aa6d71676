// The memory in which the ranks of one machine sum their gradients, and the threads that do it.

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

// Values that stand together in every slot.
struct Segment {
    std::size_t offset;  // bytes
    std::size_t count;
    DType dtype;
};

// The blocks in which a chunk is summed; block i has the segments from first[i] to first[i + 1].
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
// The operation that a rank has not done, or its death.
enum class Fault : std::uint32_t { none, died, post, commit, sum, publish, drain };

// One rank's view. A thread may wait or publish while another posts; a step that is drained takes no
// more of either. Steps are begun, and chunks set, while no thread does anything else.
class Arena {
public:
    struct Options {
        double scale;
        bool held;        // a step is complete only when every chunk has been published
        bool own_core;    // a rank that spins takes no core from a rank that computes
        bool spare_core;  // a reducer thread need not stop while its rank waits and sums
        bool with_thread;
    };

    // `shared` is all of the file, `results` this rank's copy-on-write mapping of its two results.
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
    void publish();  // one more chunk
    void commit();

    // Sum blocks and sleep until the goal is reached, for at most 50 ms or until a signal.
    Status wait(Goal goal, std::uint32_t step, std::size_t chunk);

    // Discard the step on all ranks; `drain` must follow. Wait for Goal::drained after it.
    void discard();
    // Stop summing this step, and count this rank as drained.
    void drain();
    bool is_discarded(std::uint32_t step) const;
    std::size_t discarded_by() const;

    // The ranks that keep a goal from being reached, and the reasons.
    std::vector<std::pair<std::size_t, Fault>> missing(Goal goal, std::uint32_t step,
                                                       std::size_t chunk) const;
    void give_up(std::size_t rank, Fault fault);
    std::vector<std::pair<std::size_t, Fault>> lost() const;

    // The times at which the last rank posted the chunk and its sum was complete, in ns.
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
    Tagged* const order_;  // chunks as they became ready, with their step

    // Held shared while a block is claimed and summed, and alone to change what follows it.
    std::shared_mutex gate_;
    std::vector<Chunk> chunks_;
    std::uint32_t step_ = 0;  // 0 while nothing may be summed
    Tagged next_{0};          // place in `order_` before which all blocks are claimed

    std::atomic<std::uint32_t> num_posted_{0};
    std::atomic<std::uint32_t> num_waiting_{0};  // threads of this rank
    std::atomic<bool> reducing_{false};          // the thread may have taken a block
    std::atomic<bool> closing_{false};
    std::unique_ptr<std::thread> thread_;
};

}  // namespace paceline
