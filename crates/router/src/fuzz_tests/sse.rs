//! Answers of vLLM and SGLang workers, streamed and whole.

use axum::body::Bytes;
use rand::Rng;
use tasuki_searches::{corpus, fuzz};

use crate::foreign::events::{Data, Splitter, data, usage_of};
use crate::workers::foreign::fuzzed::{first_error, merge, merge_events, prompt_logprobs, ticket};

const CORPUS: &str = include_str!("../../fuzz/sse.txt");

#[test]
fn fuzzed_streams_say_the_same_however_they_are_cut() {
    fuzz("sse", &corpus(CORPUS), 20_000, |stream, random| {
        let mut whole = Splitter::default();
        let expected = whole.push(Bytes::copy_from_slice(stream)).expect("short");
        let mut splitter = Splitter::default();
        let (mut joined, mut rest) = (Vec::new(), stream);
        while !rest.is_empty() {
            let (part, later) = rest.split_at(random.random_range(1..=rest.len().min(40)));
            let events = splitter.push(Bytes::copy_from_slice(part)).expect("short");
            assert!(events.last().is_none_or(|end| b"\r\n".contains(end)));
            joined.extend_from_slice(&events);
            rest = later;
        }
        // An empty line more is no event; it may wait for what follows.
        let waits = expected
            .strip_prefix(&joined[..])
            .expect("the same beginning");
        assert!(
            waits.iter().all(|byte| b"\r\n".contains(byte)),
            "cut otherwise"
        );
        for (at, event) in data(&joined).enumerate() {
            let _ = Data::of(event, at > 0);
        }
        let _ = first_error(&expected);
        // The same bytes as whole answers.
        let _ = (usage_of(stream), ticket(stream));
        for streamed in [false, true] {
            let logprobs = prompt_logprobs(stream, streamed);
            let _ = merge(stream, &logprobs);
            let merged = merge_events(&expected, &logprobs);
            assert_eq!(data(&merged).count(), data(&expected).count());
        }
    });
}
