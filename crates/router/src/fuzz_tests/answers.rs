//! Models' answers with tool calls and reasoning.

use rand::Rng;
use tasuki_searches::{corpus, fuzz};

use crate::openai::fuzzed::{readers, scan};

const CORPUS: &str = include_str!("../../fuzz/answers.txt");

#[test]
fn fuzzed_answers_say_the_same_however_they_are_cut() {
    let readers = readers();
    fuzz("answers", &corpus(CORPUS), 20_000, |bytes, random| {
        let answer = String::from_utf8_lossy(bytes);
        let (mut pieces, mut rest) = (Vec::new(), &*answer);
        while !rest.is_empty() {
            let characters = random.random_range(1..24);
            let cut = rest.char_indices().nth(characters);
            let (piece, later) = rest.split_at(cut.map_or(rest.len(), |(at, _)| at));
            pieces.push(piece);
            rest = later;
        }
        let reader = &readers[random.random_range(0..readers.len())];
        let streamed = scan(reader, pieces.iter().copied());
        assert_eq!(
            streamed,
            scan(reader, [&*answer]),
            "{answer:?} in {pieces:?}"
        );
    });
}
