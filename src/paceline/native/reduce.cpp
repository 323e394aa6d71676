// Divide chunks into blocks; claim and sum blocks in the threads of all ranks: a reducer thread per
// rank, and the rank's own thread while the rank waits.

#include <algorithm>
#include <mutex>

#include <sched.h>

#include "arena.hpp"
#include "futex.hpp"

namespace paceline {
namespace {

// Large enough that claiming a block takes little time, small enough that threads end together.
constexpr std::size_t block_nbytes = std::size_t{256} << 10;
constexpr std::size_t smallest_block_nbytes = std::size_t{32} << 10;
constexpr std::size_t line = 64;

std::size_t nbytes_of(const std::vector<Segment>& segments) {
    std::size_t nbytes = 0;
    for (const Segment& segment : segments) nbytes += segment.count * size_of(segment.dtype);
    return nbytes;
}

}  // namespace

Chunk cut(const std::vector<Segment>& segments, std::size_t num_ranks) {
    const std::size_t nbytes = nbytes_of(segments);
    // Make blocks of a small chunk so small that each rank can sum one.
    const std::size_t share = nbytes / num_ranks / line * line + line;
    const std::size_t size = std::clamp(share, smallest_block_nbytes, block_nbytes);
    Chunk chunk{{}, {0}, nbytes, nbytes > cache_nbytes()};
    std::size_t filled = 0;
    for (Segment rest : segments) {
        const std::size_t element = size_of(rest.dtype);
        while (rest.count > 0) {
            // Blocks end at cache lines, so that no two threads write to the same cache line.
            const std::size_t end = (rest.offset + size - filled) / line * line;
            const std::size_t fits = end > rest.offset ? (end - rest.offset) / element : 0;
            const std::size_t taken = std::min(rest.count, fits);
            if (taken > 0) chunk.segments.push_back({rest.offset, taken, rest.dtype});
            rest.offset += taken * element;
            rest.count -= taken;
            filled += taken * element;
            if (rest.count > 0 || filled >= size) {
                chunk.first.push_back(chunk.segments.size());
                filled = 0;
            }
        }
    }
    if (filled > 0) chunk.first.push_back(chunk.segments.size());
    return chunk;
}

// Claim the next block of a chunk; return false if all are claimed. Another process may have
// written an invalid index of the chunk; then also return false.
bool Arena::take(std::size_t chunk, std::uint32_t& block) {
    if (chunk >= chunks_.size()) return false;
    Tagged& claimed = chunk_states_[chunk].claimed;
    std::uint64_t seen = claimed;
    while (count_in(seen) < chunks_[chunk].num_blocks()) {
        if (claimed.compare_exchange_weak(seen, seen + 1)) {
            block = count_in(seen);
            return true;
        }
    }
    return false;
}

// Claim the next block of the first chunk that has an unclaimed block; return false if none has.
bool Arena::claim(std::size_t& chunk, std::uint32_t& block) {
    std::uint64_t next = next_;
    while (step_in(next) == step_) {
        const std::uint64_t ready = header_.ready;
        if (step_in(ready) != step_ || count_in(next) >= count_in(ready)) return false;
        if (count_in(next) >= layout_.max_chunks) return false;
        const std::uint64_t entry = order_[count_in(next)];
        if (step_in(entry) != step_) return false;  // counted in `ready`, but not yet written
        chunk = count_in(entry);
        if (take(chunk, block)) return true;
        if (next_.compare_exchange_strong(next, next + 1)) ++next;
    }
    return false;
}

bool Arena::sum_one_block() {
    const std::shared_lock shared(gate_);
    if (step_ == 0 || is_discarded(step_)) return false;
    std::size_t chunk;
    std::uint32_t block;
    if (!claim(chunk, block)) return false;
    RankState& rank = ranks_[rank_];
    ++rank.claimed;
    sum_block(chunks_[chunk], block);
    ++rank.summed;
    if (tick(chunk_states_[chunk].summed, step_) == chunks_[chunk].num_blocks()) complete(chunk);
    return true;
}

void Arena::sum_block(const Chunk& chunk, std::uint32_t block) {
    std::vector<const void*> sources(layout_.num_ranks);
    for (std::size_t i = chunk.first[block]; i < chunk.first[block + 1]; ++i) {
        const Segment& segment = chunk.segments[i];
        for (std::size_t rank = 0; rank < sources.size(); ++rank) {
            sources[rank] = slot(rank) + segment.offset;
        }
        sum(kernels_, segment.dtype, sources.data(), sources.size(), options_.scale,
            result(step_ % 2) + segment.offset, segment.count, chunk.streaming);
    }
}

// Run the reducer thread, which sums blocks when it is woken, and never spins. Without a spare
// core, it runs only on idle cores (SCHED_IDLE), so that computing ranks are not slowed down. Then
// the first rank that waits sums, because it would often have to wait for other ranks anyway.
void Arena::reduce() {
    const sched_param none{0};
    if (!options_.spare_core) sched_setscheduler(0, SCHED_IDLE, &none);
    while (!closing_) {
        const std::uint32_t seen = header_.work;
        // Without a spare core, stop while a thread of this rank waits, because that thread sums.
        reducing_ = true;
        while (!closing_ && (options_.spare_core || num_waiting_ == 0) && sum_one_block()) {
        }
        reducing_ = false;
        const Counted idle(header_.idle);
        if (!closing_) futex_wait(header_.work, seen, -1);
    }
}

}  // namespace paceline
