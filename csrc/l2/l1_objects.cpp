// l1_objects.cpp: see l1_objects.h.
#include "l2/l1_objects.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>

#include "copy/threads.h"

namespace kvserver {

namespace {

void check_counts(const std::vector<uint32_t>& counts, const std::vector<Extent>& extents) {
    if (std::accumulate(counts.begin(), counts.end(), uint64_t{0}) != extents.size())
        throw std::invalid_argument("objects: the counts are not those of the extents");
}

bool is_within(const Extent& extent, uint64_t pages) {
    return extent.first < pages && extent.count <= pages - extent.first;
}

}  // namespace

KeptPages kept_pages(const std::vector<uint32_t>& counts, const std::vector<Extent>& extents,
                     uint32_t pages) {
    check_counts(counts, extents);
    KeptPages kept;
    std::vector<Extent> used;
    used.reserve(extents.size());
    auto begin = extents.begin();
    for (uint32_t count : counts) {
        const auto end = begin + count;
        const bool empty = count == 0 || std::any_of(begin, end, [](auto& e) { return !e.count; });
        if (empty) throw std::invalid_argument("objects: one has no page");
        const bool fits = std::all_of(begin, end, [&](auto& e) { return is_within(e, pages); });
        kept.fits.push_back(fits);
        if (fits) used.insert(used.end(), begin, end);
        begin = end;
    }
    std::sort(used.begin(), used.end(), [](auto& a, auto& b) { return a.first < b.first; });
    uint32_t next = 0;
    for (const Extent& extent : used) {
        if (extent.first < next) throw std::invalid_argument("objects: two share a page");
        if (extent.first > next) kept.free.push_back({next, extent.first - next});
        next = extent.first + extent.count;
    }
    if (next < pages) kept.free.push_back({next, pages - next});
    return kept;
}

std::vector<DigestBytes> digest_objects(const L1& l1, const std::vector<uint32_t>& counts,
                                        const std::vector<Extent>& extents, unsigned threads,
                                        uint64_t deadline_nanos) {
    check_l1(l1);
    check_counts(counts, extents);
    const uint64_t pages = l1.region->size() / l1.page_bytes;
    for (const Extent& extent : extents)
        if (!is_within(extent, pages)) throw std::invalid_argument("objects: beyond L1");
    std::vector<size_t> firsts(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), firsts.begin(), size_t{0});
    std::vector<DigestBytes> digests(counts.size());
    std::atomic<size_t> next{0};
    run_by(threads, [&] {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < counts.size();) {
            if (deadline_nanos != 0 && monotonic_nanos() > deadline_nanos) return;
            Digest digest;
            for (size_t at = firsts[i]; at < firsts[i] + counts[i]; ++at)
                digest.update(l1.region->data() + extents[at].first * l1.page_bytes,
                              extents[at].count * l1.page_bytes);
            digests[i] = digest.value();
        }
    });
    return digests;
}

}  // namespace kvserver
