//! Chunks of prompts: the unit in which it is known who holds which prompt's beginning.
//!
//! A chunk is a few of a worker's blocks. Its name is that of its last block, which stands for
//! all tokens up to its end. Workers of one identity, block size and chunk size use the same
//! names, so a prompt is hashed once for each such [`ChunkScheme`].

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::{BlockHash, BlockHasher, Identity};

/// A chunk is the fewest blocks that hold so many tokens, unless a worker says otherwise:
/// finer than that, a hit saves less than it costs to know of it.
const CHUNK_TOKENS: u32 = 128;

/// How a worker's chunks are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ChunkScheme {
    pub identity: Identity,
    /// At least 1.
    pub block_tokens: u32,
    /// At least 1.
    pub chunk_blocks: u32,
}

impl ChunkScheme {
    /// Of a worker that does not say how many blocks its chunks have.
    pub fn of_blocks(identity: Identity, block_tokens: u32) -> Self {
        let block_tokens = block_tokens.max(1);
        Self {
            identity,
            block_tokens,
            chunk_blocks: CHUNK_TOKENS.div_ceil(block_tokens),
        }
    }

    /// Tokens in a chunk.
    pub fn chunk_tokens(&self) -> u32 {
        self.block_tokens.saturating_mul(self.chunk_blocks)
    }

    /// The names of a prompt's whole chunks, by those of its chunks of 128 tokens.
    pub fn renamed(&self, names: &Arc<[u64]>) -> Arc<[u64]> {
        let tokens = self.chunk_tokens();
        if tokens == CHUNK_TOKENS {
            return Arc::clone(names);
        }
        // Each is that of the first of them that has its end.
        let ends = (1..).map(|chunks: u32| chunks.saturating_mul(tokens).div_ceil(CHUNK_TOKENS));
        ends.map_while(|end| names.get(end as usize - 1).copied())
            .collect()
    }

    /// The names of a prompt's whole chunks. `salt`: prompts of different salts share nothing.
    fn names(&self, salt: &str, prompt: &[u32]) -> Box<[u64]> {
        let mut hasher = BlockHasher::new(&self.identity, salt);
        let blocks = prompt.chunks_exact(self.block_tokens as usize);
        let hashes = blocks.map(|block| hasher.push(block));
        let ends = hashes.skip(self.chunk_blocks as usize - 1);
        ends.step_by(self.chunk_blocks as usize).map(name).collect()
    }

    /// The same by a quicker hash, whose names no worker knows.
    fn names_of_text(&self, salt: &str, prompt: &[u32]) -> Box<[u64]> {
        let mut hasher = DefaultHasher::new();
        (self.identity, salt).hash(&mut hasher);
        let chunks = prompt.chunks_exact(self.chunk_tokens() as usize);
        let names = chunks.map(|chunk| {
            u32::hash_slice(chunk, &mut hasher);
            hasher.finish()
        });
        names.collect()
    }
}

/// The names of a prompt's whole chunks, by each scheme of its model's workers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chunks(Arc<[(ChunkScheme, Box<[u64]>)]>);

impl Chunks {
    /// Hashes a prompt once for each scheme: some 10 ns a token. `salt`: as workers are told it.
    pub fn new(schemes: &[ChunkScheme], salt: &str, prompt: &[u32]) -> Self {
        let named = |scheme: &ChunkScheme| (*scheme, scheme.names(salt, prompt));
        Self(schemes.iter().map(named).collect())
    }

    /// Of text whose tokens are not known: `prompt` has stand-ins for them, which say where two
    /// prompts begin alike. Only for workers that do not report their cache: these names are
    /// not theirs, and take a tenth of the time.
    pub fn of_text(schemes: &[ChunkScheme], salt: &str, prompt: &[u32]) -> Self {
        let named = |scheme: &ChunkScheme| (*scheme, scheme.names_of_text(salt, prompt));
        Self(schemes.iter().map(named).collect())
    }

    /// Of a prompt whose chunks of 128 tokens have known names: a recorded one, for example.
    pub fn named(schemes: &[ChunkScheme], names: &Arc<[u64]>) -> Self {
        let named = |scheme: &ChunkScheme| (*scheme, (&*scheme.renamed(names)).into());
        Self(schemes.iter().map(named).collect())
    }

    /// From the first chunk on; empty for a scheme that was not known when the prompt came.
    pub fn by(&self, scheme: &ChunkScheme) -> &[u64] {
        let known = self.0.iter().find(|(known, _)| known == scheme);
        known.map_or(&[], |(_, names)| names)
    }

    /// All schemes, and the names by each.
    pub fn all(&self) -> impl Iterator<Item = (&ChunkScheme, &[u64])> {
        self.0.iter().map(|(scheme, names)| (scheme, &**names))
    }
}

/// Half of the hash: a chunk of another prompt has the same name once in 2^64.
fn name(hash: BlockHash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = hash.0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_hashes;

    const SCHEME: ChunkScheme = ChunkScheme {
        identity: Identity([7; 16]),
        block_tokens: 16,
        chunk_blocks: 3,
    };

    fn names(scheme: &ChunkScheme, salt: &str, prompt: &[u32]) -> Vec<u64> {
        Chunks::new(&[*scheme], salt, prompt).by(scheme).to_vec()
    }

    #[test]
    fn a_chunk_is_named_by_its_last_block() {
        let prompt: Vec<u32> = (0..16 * 8 + 5).collect();
        let hashes = block_hashes(&SCHEME.identity, "a", 16, &prompt);
        let expected = vec![name(hashes[2]), name(hashes[5])];
        assert_eq!(names(&SCHEME, "a", &prompt), expected);
    }

    #[test]
    fn text_that_begins_alike_has_equal_first_chunks() {
        let names = |scheme: ChunkScheme, salt, prompt: &[u32]| {
            let chunks = Chunks::of_text(&[scheme], salt, prompt);
            chunks.by(&scheme).to_vec()
        };
        let one: Vec<u32> = (0..48 * 3 + 5).collect();
        let mut other = one.clone();
        other[48] = 7;
        let [a, b] = [&one, &other].map(|prompt| names(SCHEME, "", prompt));
        assert_eq!((a.len(), b.len()), (3, 3));
        assert_eq!(a[0], b[0]);
        assert!(
            a[1] != b[1] && a[2] != b[2],
            "a name stands for all before it"
        );
        assert_ne!(a[0], names(SCHEME, "salt", &one)[0]);
        let identity = Identity([8; 16]);
        assert_ne!(a[0], names(ChunkScheme { identity, ..SCHEME }, "", &one)[0]);
        assert_ne!(a[0], Chunks::new(&[SCHEME], "", &one).by(&SCHEME)[0]);
    }

    #[test]
    fn a_prompt_shorter_than_a_chunk_has_none() {
        assert!(names(&SCHEME, "", &[1; 47]).is_empty());
        assert_eq!(names(&SCHEME, "", &[1; 48]).len(), 1);
    }

    #[test]
    fn salts_and_schemes_share_nothing() {
        let prompt: Vec<u32> = (0..48).collect();
        let other = ChunkScheme {
            identity: Identity([8; 16]),
            ..SCHEME
        };
        let chunks = Chunks::new(&[SCHEME, other], "", &prompt);
        assert_ne!(chunks.by(&SCHEME), chunks.by(&other));
        assert_ne!(names(&SCHEME, "a", &prompt), names(&SCHEME, "b", &prompt));
        let unknown = ChunkScheme::of_blocks(Identity([9; 16]), 16);
        assert!(chunks.by(&unknown).is_empty());
    }

    #[test]
    fn a_chunk_has_128_tokens_unless_a_worker_says_otherwise() {
        let blocks = |block| ChunkScheme::of_blocks(Identity::default(), block).chunk_blocks;
        assert_eq!(
            [1, 16, 32, 100, 128, 1_024].map(blocks),
            [128, 8, 4, 2, 1, 1]
        );
    }
}
