//! Chained block hashes: the name of a prefix, the same in router and worker.
//!
//! With `H` = BLAKE2b of 16 bytes:
//!
//! ```text
//! root   = H("tasuki-block-v1" || identity[16] || u32le(len(tenant)) || tenant as UTF-8)
//! hash_0 = H(root       || tokens of block 0, each u32le)
//! hash_i = H(hash_{i-1} || tokens of block i, each u32le)
//! ```
//!
//! Golden values: `tests/golden/block_hashes.json`, read by Python's tests too.

use blake2::digest::{Digest, consts::U16};

use crate::Identity;

type Blake2b128 = blake2::Blake2b<U16>;

const ROOT: &[u8] = b"tasuki-block-v1";

/// Names a block and everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

/// Hashes a sequence block by block.
#[derive(Debug, Clone, Copy)]
pub struct BlockHasher {
    parent: BlockHash,
}

impl BlockHasher {
    /// Starts a chain. Sequences of another identity or tenant never share a hash.
    pub fn new(identity: &Identity, tenant: &str) -> Self {
        let length = u32::try_from(tenant.len()).expect("a tenant's name is shorter than 4 GiB");
        let mut hash = Blake2b128::new();
        hash.update(ROOT);
        hash.update(identity.0);
        hash.update(length.to_le_bytes());
        hash.update(tenant.as_bytes());
        Self {
            parent: BlockHash(hash.finalize().into()),
        }
    }

    /// The hash before the first block.
    pub fn root(&self) -> BlockHash {
        self.parent
    }

    /// Appends one full block.
    pub fn push(&mut self, tokens: &[u32]) -> BlockHash {
        let mut hash = Blake2b128::new();
        hash.update(self.parent.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        self.parent = BlockHash(hash.finalize().into());
        self.parent
    }
}

/// Hashes of all full blocks of `tokens`, in order.
///
/// # Panics
///
/// When `block_size_tokens` is 0.
pub fn block_hashes(
    identity: &Identity,
    tenant: &str,
    block_size_tokens: usize,
    tokens: &[u32],
) -> Vec<BlockHash> {
    let mut hasher = BlockHasher::new(identity, tenant);
    tokens
        .chunks_exact(block_size_tokens)
        .map(|block| hasher.push(block))
        .collect()
}
