//! What workers say of their prefix caches, and how prompts are hashed to compare with it.

use tasuki_core::{ChunkScheme, Identity, ModelId};
use tasuki_flow::fleet::CacheEvents;
use tasuki_wire::v1;

use super::registry::Registry;

/// How a worker names the chunks of prompts. `chunk_blocks` is 0 where it does not say.
pub fn scheme(identity: Identity, block_tokens: u32, chunk_blocks: u32) -> ChunkScheme {
    match chunk_blocks {
        0 => ChunkScheme::of_blocks(identity, block_tokens),
        _ => ChunkScheme {
            identity,
            block_tokens: block_tokens.max(1),
            chunk_blocks,
        },
    }
}

/// Events from the wire.
pub fn events(events: v1::KvEvents) -> CacheEvents {
    CacheEvents {
        number: events.number,
        reset: events.reset,
        stored: events.stored,
        dropped: events.dropped,
        held: events.held,
    }
}

impl Registry {
    /// How the workers of a model name the chunks of prompts.
    pub fn chunk_schemes(&self, model: ModelId) -> Vec<ChunkScheme> {
        self.lock().fleet.chunk_schemes(model)
    }

    /// Lets all of our workers that are connected empty their prefix caches. How many they are.
    pub fn flush_caches(&self) -> usize {
        let state = self.lock();
        let connections = state.members.values().filter_map(|m| m.connection.as_ref());
        connections.filter(|c| c.link.flush_cache()).count()
    }
}

#[cfg(test)]
mod tests {
    use crate::workers::testing::info as worker_info;
    use crate::workers::wire::info;
    use tasuki_wire::v1;

    #[test]
    fn a_worker_of_before_events_is_estimated_in_chunks_of_128_tokens() {
        let known = info(worker_info("a", v1::Role::Mixed)).expect("known");
        assert!(!known.capabilities.reports_cache);
        assert_eq!(known.chunks.chunk_tokens(), 128);
        let mut sends = worker_info("a", v1::Role::Mixed);
        sends.kv_event_blocks = 2;
        let known = info(sends).expect("known");
        assert!(known.capabilities.reports_cache);
        assert_eq!(known.chunks.chunk_tokens(), 32);
    }
}
