// lru_sizes.cpp: LRU caches of several sizes that serve the same prompts, one after the other: the
// exact reference of bench/what_if.py, which compiles it. Objects have numbers; each has some
// pages.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

struct Lru {
    static constexpr uint32_t kEnd = 0;  // of the ring; object i is place i + 1
    uint64_t pages, used = 0;
    std::vector<uint32_t> older, younger;  // kEnd in both: absent, or the ring has one object

    Lru(uint64_t most, size_t objects)
        : pages(most), older(objects + 1), younger(objects + 1), in(objects + 1) {}
    std::vector<bool> in;

    void unlink(uint32_t at) {
        younger[older[at]] = younger[at];
        older[younger[at]] = older[at];
        in[at] = false;
    }
    void use(uint32_t at, const uint32_t* sizes) {
        if (in[at]) {
            unlink(at);
            used -= sizes[at - 1];
        }
        older[at] = older[kEnd];
        younger[at] = kEnd;
        younger[older[kEnd]] = at;
        older[kEnd] = at;
        in[at] = true;
        used += sizes[at - 1];
        while (used > pages) {
            const uint32_t oldest = younger[kEnd];
            unlink(oldest);
            used -= sizes[oldest - 1];
        }
    }
};

struct Sizes {
    std::vector<Lru> caches;
    const uint32_t* pages;
};

}  // namespace

// `pages`: of each object; they are read as long as the caches are used.
extern "C" void* make_caches(const uint64_t* sizes, size_t count, const uint32_t* pages,
                             size_t objects) {
    auto* made = new Sizes{{}, pages};
    for (size_t i = 0; i < count; ++i) made->caches.emplace_back(sizes[i], objects);
    return made;
}

// The leading objects that each cache has; then it uses all of them, the first one last.
extern "C" void serve(void* of, const uint32_t* prompt, size_t length, uint64_t* hits) {
    auto* sizes = static_cast<Sizes*>(of);
    for (size_t i = 0; i < sizes->caches.size(); ++i) {
        Lru& cache = sizes->caches[i];
        size_t hit = 0;
        while (hit < length && cache.in[prompt[hit] + 1]) ++hit;
        hits[i] = hit;
        for (size_t at = length; at-- > 0;) cache.use(prompt[at] + 1, sizes->pages);
    }
}

// Objects in the largest cache.
extern "C" size_t resident(void* of) {
    const std::vector<bool>& in = static_cast<Sizes*>(of)->caches.back().in;
    return static_cast<size_t>(std::count(in.begin(), in.end(), true));
}

extern "C" void free_caches(void* of) { delete static_cast<Sizes*>(of); }
