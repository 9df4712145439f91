//! Who holds what, one rule at a time.

mod search;

use tasuki_core::Identity;

use super::*;
use crate::testing::leg_spec;

const A: WorkerId = WorkerId(0);
const B: WorkerId = WorkerId(1);
const MODEL: ModelId = ModelId(0);
const CHUNK_TOKENS: u32 = 32;
const SCHEME: ChunkScheme = ChunkScheme {
    identity: Identity([7; 16]),
    block_tokens: 16,
    chunk_blocks: 2,
};
/// 32 chunks.
const POOL_TOKENS: u64 = 1_024;

/// Of workers that report their cache, or do not.
fn index(workers: u32, reports: bool) -> PrefixIndex {
    let mut index = PrefixIndex::default();
    for id in 0..workers {
        index.join(WorkerId(id), MODEL, (SCHEME, reports), POOL_TOKENS);
    }
    index
}

/// A prompt of so many chunks; those of different kinds share the first `common` ones.
fn prompt(kind: u32, common: u32, chunks: u32) -> Chunks {
    let token = |at: u32| {
        if at < common * CHUNK_TOKENS {
            at
        } else {
            at + 1_000 * kind
        }
    };
    let tokens: Vec<u32> = (0..chunks * CHUNK_TOKENS).map(token).collect();
    Chunks::new(&[SCHEME], "", &tokens)
}

fn names(chunks: &Chunks) -> Vec<u64> {
    chunks.by(&SCHEME).to_vec()
}

fn place(index: &mut PrefixIndex, worker: WorkerId, chunks: &Chunks) -> PlacedPrompt {
    let leg = LegSpec {
        chunks: chunks.clone(),
        ..leg_spec(LegKind::Colocated, 1, 1)
    };
    index.on_placed(worker, &leg)
}

fn warmest(index: &PrefixIndex, chunks: &Chunks) -> Option<(WorkerId, u32)> {
    let warm = index.warmest(chunks, |_| [true; 2], |_| ());
    assert!(warm.len() < 2, "one worker may serve both halves: {warm:?}");
    let warm = warm.first()?;
    Some((warm.worker, warm.tokens / CHUNK_TOKENS))
}

fn stored(number: u64, names: Vec<u64>) -> CacheEvents {
    CacheEvents {
        number,
        reset: number == 1,
        stored: names,
        ..CacheEvents::default()
    }
}

#[test]
fn the_one_that_holds_most_of_the_beginning_is_found() {
    let mut index = index(2, false);
    assert_eq!(warmest(&index, &prompt(1, 0, 4)), None);
    place(&mut index, A, &prompt(1, 2, 6));
    place(&mut index, B, &prompt(2, 2, 4));
    assert_eq!(warmest(&index, &prompt(1, 2, 9)), Some((A, 6)));
    assert_eq!(warmest(&index, &prompt(2, 2, 9)), Some((B, 4)));
    assert_eq!(warmest(&index, &prompt(3, 2, 9)), Some((B, 2)));
    assert_eq!(warmest(&index, &prompt(4, 0, 9)), None);
    let not_b = index.warmest(&prompt(2, 2, 9), |id| [id != B; 2], |_| ());
    assert_eq!(not_b.first().map(|warm| warm.worker), Some(A));
    let expected = index.expected(A, &prompt(2, 2, 9));
    assert_eq!((expected.stored, expected.placed), (0, 2 * CHUNK_TOKENS));
    index.forget(A);
    assert_eq!(warmest(&index, &prompt(1, 2, 9)), Some((B, 2)));
}

#[test]
fn for_each_half_the_warmest_worker_is_found() {
    let mut index = index(4, true);
    for (id, chunks) in [(0, 3), (1, 4), (2, 6), (3, 5)] {
        let names = names(&prompt(1, 0, chunks));
        assert!(index.on_events(WorkerId(id), &stored(1, names)));
    }
    let halves = |id: WorkerId| [id.0 < 2, id.0 >= 2];
    let warm = index.warmest(&prompt(1, 0, 9), halves, |_| ());
    let warm: Vec<_> = warm
        .iter()
        .map(|w| (w.worker.0, w.tokens / CHUNK_TOKENS))
        .collect();
    assert_eq!(warm, [(1, 4), (2, 6)]);
}

#[test]
fn workers_with_blocks_of_other_sizes_are_compared_by_tokens() {
    let fine = ChunkScheme {
        block_tokens: 8,
        chunk_blocks: 1,
        ..SCHEME
    };
    let mut index = index(1, true);
    index.join(B, MODEL, (fine, true), POOL_TOKENS);
    let tokens: Vec<u32> = (0..8 * CHUNK_TOKENS).collect();
    let chunks = Chunks::new(&index.schemes(MODEL), "", &tokens);
    let held = |scheme: &ChunkScheme, count: usize| chunks.by(scheme)[..count].to_vec();
    let first = |index: &PrefixIndex| {
        let warm = index.warmest(&chunks, |_| [true; 2], |_| ());
        warm.first().map(|warm| (warm.worker, warm.tokens))
    };
    assert!(index.on_events(A, &stored(1, held(&SCHEME, 3))));
    assert!(index.on_events(B, &stored(1, held(&fine, 10))));
    assert_eq!(first(&index), Some((A, 96)));
    assert!(index.on_events(B, &stored(2, held(&fine, 13))));
    assert_eq!(first(&index), Some((B, 104)));
    assert_eq!(index.expected(A, &chunks).stored, 96);
    assert_eq!(index.expected(B, &chunks).stored, 104);
}

#[test]
fn of_those_that_hold_as_much_the_least_loaded_is_found() {
    let mut index = index(100, false);
    for id in 0..100 {
        place(&mut index, WorkerId(id), &prompt(1, 0, 4));
    }
    let load = |id: WorkerId| if id == WorkerId(97) { 0 } else { 1 };
    let warm = index.warmest(&prompt(1, 0, 4), |_| [true; 2], load);
    assert_eq!(warm.first().map(|warm| warm.worker), Some(WorkerId(97)));
}

#[test]
fn a_worker_forgets_what_was_not_used_for_longest() {
    let mut index = index(1, false);
    place(&mut index, A, &prompt(1, 0, 16));
    place(&mut index, A, &prompt(2, 0, 16));
    place(&mut index, A, &prompt(1, 0, 16)); // 32 chunks are all
    place(&mut index, A, &prompt(3, 0, 8));
    assert_eq!(warmest(&index, &prompt(1, 0, 16)), Some((A, 16)));
    // The ends go first: what is left of the beginning is still of use.
    assert_eq!(warmest(&index, &prompt(2, 0, 16)), Some((A, 8)));
}

#[test]
fn an_estimate_is_bounded_by_the_pool() {
    let mut index = index(2, false);
    for kind in 0..1_000 {
        place(&mut index, A, &prompt(kind, 2, 10));
        place(&mut index, B, &prompt(0, 2, 10));
    }
    assert!(index.holders.len() <= 32 + 10, "{}", index.holders.len());
    for held in index.workers.values() {
        assert!(held.len() <= 32 && held.order_len() <= 2 * 32 + 64);
    }
}

#[test]
fn hits_that_do_not_come_are_expected_less() {
    let mut index = index(1, false);
    let chunks = prompt(1, 0, 16);
    place(&mut index, A, &chunks);
    for _ in 0..60 {
        let placed = place(&mut index, A, &chunks);
        index.on_settled(A, &placed, Some(0));
    }
    assert!(index.expected(A, &chunks).likely < 512 / 4);
    for _ in 0..60 {
        let placed = place(&mut index, A, &chunks);
        index.on_settled(A, &placed, Some(512));
    }
    assert!(index.expected(A, &chunks).likely > 512 * 8 / 10);
}

#[test]
fn what_a_worker_reports_counts_whole() {
    let mut index = index(2, true);
    assert!(index.on_events(B, &stored(1, names(&prompt(1, 0, 6)))));
    assert_eq!(warmest(&index, &prompt(1, 0, 9)), Some((B, 6)));
    let expected = index.expected(B, &prompt(1, 0, 9));
    assert_eq!((expected.stored, expected.placed), (6 * CHUNK_TOKENS, 0));
    let drop = CacheEvents {
        number: 2,
        dropped: names(&prompt(1, 0, 6))[4..].to_vec(),
        ..CacheEvents::default()
    };
    assert!(index.on_events(B, &drop));
    assert_eq!(warmest(&index, &prompt(1, 0, 9)), Some((B, 4)));
}

#[test]
fn a_placed_prompt_is_forgotten_unless_it_is_stored_when_there_is_output() {
    let mut index = index(1, true);
    let chunks = prompt(1, 0, 6);
    let placed = place(&mut index, A, &chunks);
    assert_eq!(warmest(&index, &chunks), Some((A, 6)));
    index.on_events(A, &stored(1, names(&chunks)[..4].to_vec()));
    index.on_settled(A, &placed, Some(0));
    assert_eq!(warmest(&index, &chunks), Some((A, 4)));
    assert!(index.on_events(
        A,
        &CacheEvents {
            number: 2,
            reset: true,
            ..CacheEvents::default()
        }
    ));
    assert_eq!(warmest(&index, &chunks), None);
}

#[test]
fn a_later_request_keeps_what_an_earlier_one_brought() {
    let mut index = index(1, true);
    let chunks = prompt(1, 0, 6);
    let first = place(&mut index, A, &chunks);
    let second = place(&mut index, A, &chunks);
    index.on_settled(A, &first, None);
    assert_eq!(warmest(&index, &chunks), Some((A, 6)));
    index.on_settled(A, &second, None);
    assert_eq!(warmest(&index, &chunks), None);
}

#[test]
fn a_worker_without_the_beginning_is_passed_over() {
    let mut index = index(2, true);
    let chunks = prompt(1, 0, 6);
    index.on_events(A, &stored(1, names(&chunks)[..3].to_vec()));
    index.on_events(B, &stored(1, names(&chunks)[1..].to_vec()));
    assert_eq!(warmest(&index, &chunks), Some((A, 3)));
    assert_eq!(index.expected(B, &chunks), Expected::default());
}

#[test]
fn a_gap_is_noticed_once_and_ends_with_a_reset() {
    let mut index = index(1, true);
    let (old, new) = (prompt(1, 0, 6), prompt(2, 0, 6));
    assert!(index.on_events(A, &stored(1, names(&old))));
    assert!(!index.on_events(A, &stored(3, names(&new))), "2 is missing");
    assert_eq!(index.chunks(A), 0, "what is not sure is forgotten");
    assert!(
        index.on_events(A, &stored(4, names(&new))),
        "it was asked already"
    );
    assert_eq!(index.chunks(A), 0);
    let reset = CacheEvents {
        reset: true,
        ..stored(5, names(&new))
    };
    assert!(index.on_events(A, &reset));
    assert_eq!(warmest(&index, &new), Some((A, 6)));
    assert!(index.on_events(A, &stored(6, names(&old))));
    assert_eq!(warmest(&index, &old), Some((A, 6)));
}

#[test]
fn events_without_a_reset_at_the_beginning_call_for_one() {
    let mut index = index(1, true);
    let mut first = stored(2, names(&prompt(1, 0, 6)));
    assert!(!index.on_events(A, &first));
    first.number = 3;
    first.reset = true;
    assert!(index.on_events(A, &first));
}

#[test]
fn of_a_worker_with_too_many_the_last_used_are_known() {
    let mut index = index(1, true);
    let many = MOST_CHUNKS as u64 + 5_000;
    let mut first = CacheEvents {
        number: 1,
        reset: true,
        held: (0..many).collect(),
        ..CacheEvents::default()
    };
    index.on_events(A, &first);
    assert_eq!(index.chunks(A), MOST_CHUNKS);
    first = CacheEvents {
        number: 2,
        stored: (many..many + 1_000).collect(),
        ..CacheEvents::default()
    };
    index.on_events(A, &first);
    let held = &index.workers[&A];
    assert_eq!(held.len(), MOST_CHUNKS);
    assert_eq!(
        held.count(&[many, 0, 1]).0,
        3,
        "the newest and the last used before"
    );
    assert_eq!(held.count(&[MOST_CHUNKS as u64 - 1]).0, 0, "the oldest");
    assert_eq!(index.holders.len(), MOST_CHUNKS);
}

#[test]
fn models_and_schemes_are_counted() {
    let mut index = index(2, true);
    let other = ChunkScheme {
        identity: Identity([8; 16]),
        ..SCHEME
    };
    index.join(WorkerId(2), MODEL, (other, true), POOL_TOKENS);
    index.join(WorkerId(3), ModelId(1), (other, true), POOL_TOKENS);
    assert_eq!(index.schemes(MODEL), vec![SCHEME, other]);
    index.forget(WorkerId(2));
    index.forget(A);
    assert_eq!(index.schemes(MODEL), vec![SCHEME]);
    index.forget(B);
    assert_eq!(index.schemes(MODEL), Vec::new());
    assert_eq!(index.schemes(ModelId(1)), vec![other]);
}
