/* page_sum.h: NH, the universal hash of UMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway, CRYPTO 1999), with 64-bit
 * words.
 *
 *   NH(key, m) = sum over i of (m[2i] + key[2i]) * (m[2i+1] + key[2i+1])  mod 2^128
 *
 * Two different chunks have equal sums with probability 2^-64 over the key.  A second sum, with the key shifted by two
 * words (Toeplitz), reduces this to 2^-128.  The cost is two products for each 16 bytes. */
#ifndef PP_PAGE_SUM_H
#define PP_PAGE_SUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    PP_SUM_CHUNK = 4096,                         /* bytes that share one pair of sums */
    PP_SUM_WORDS = PP_SUM_CHUNK / 8,             /* words of a chunk */
    PP_SUM_KEY_BYTES = PP_SUM_CHUNK + 2 * 8,     /* size of the key */
    PP_SUM_BYTES = 2 * sizeof(unsigned __int128) /* size of the sums of a chunk */
};

static inline uint64_t pp_sum_word(const unsigned char *bytes, size_t i)
{
    uint64_t word;
    memcpy(&word, bytes + 8 * i, sizeof word);
    return word;
}

/* Both sums of one chunk of n words, an even number of at most PP_SUM_WORDS. */
static inline void pp_sum_chunk(const unsigned char *key, const unsigned char *chunk, size_t n, unsigned char *sums)
{
    unsigned __int128 first = 0, second = 0;
    for (size_t i = 0; i < n; i += 2) {
        const uint64_t a = pp_sum_word(chunk, i), b = pp_sum_word(chunk, i + 1);
        first += (unsigned __int128)(a + pp_sum_word(key, i)) * (b + pp_sum_word(key, i + 1));
        second += (unsigned __int128)(a + pp_sum_word(key, i + 2)) * (b + pp_sum_word(key, i + 3));
    }
    memcpy(sums, &first, sizeof first);
    memcpy(sums + sizeof first, &second, sizeof second);
}

/* Bytes of the sums of a page. */
static inline int64_t pp_page_sums_bytes(int64_t bytes)
{
    return (bytes + PP_SUM_CHUNK - 1) / PP_SUM_CHUNK * PP_SUM_BYTES;
}

/* Computes the sums of all chunks, PP_SUM_BYTES for each.  The last chunk is padded with zeros.  The caller also hashes
 * `bytes`, so that the number of zeros at the end changes the result. */
static inline void pp_page_sums(const unsigned char *key, const unsigned char *page, size_t bytes, unsigned char *sums)
{
    unsigned char last[PP_SUM_CHUNK];
    for (; bytes >= PP_SUM_CHUNK; bytes -= PP_SUM_CHUNK, page += PP_SUM_CHUNK, sums += PP_SUM_BYTES)
        pp_sum_chunk(key, page, PP_SUM_WORDS, sums);
    if (bytes) {
        memset(last, 0, sizeof last);
        memcpy(last, page, bytes);
        pp_sum_chunk(key, last, PP_SUM_WORDS, sums);
    }
}

#endif
