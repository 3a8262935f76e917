/* The optimizer's moments on disk: a safetensors file a rank, optimizer-00000-of-00008.safetensors. Every rank
   stores one piece of each bucket, also under ZeRO 0 where it could store all; the pieces of all ranks make up the
   bucket. So any number of ranks, under any stage, can read what any other wrote.

   Of bucket b the file holds elements [bucket_first[b], bucket_first[b] + n):
     bucket_first                          I64 (buckets)
     first_moment.<b>, second_moment.<b>   (n), of the moments' dtype
   Metadata: format, rank, ranks, zero_stage. */
#ifndef LLMC_MOMENTS_H
#define LLMC_MOMENTS_H

#include "optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOMENTS_NAME_BYTES = 64 };
void moments_file_name(char name[MOMENTS_NAME_BYTES], int rank, int ranks);

/* This rank's file, into the folder; its checksum and size. */
enum status moments_write(
    const char *folder, const struct optimizer *optimizer, uint64_t *xxh64, uint64_t *bytes);
/* What this rank keeps, from the files of `file_ranks` ranks. */
enum status moments_read(const char *folder, int file_ranks, struct optimizer *optimizer);

#ifdef __cplusplus
}
#endif

#endif
