//! Models' answers with tool calls and reasoning.

use rand::Rng;
use tasuki_searches::{corpus, fuzz};

use crate::openai::fuzzed::{scan, scanners};

const CORPUS: &str = include_str!("../../fuzz/answers.txt");

#[test]
fn fuzzed_answers_say_the_same_however_they_are_cut() {
    let scanners = scanners();
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
        let scanner = &scanners[random.random_range(0..scanners.len())];
        let streamed = scan(scanner, pieces.iter().copied());
        assert_eq!(
            streamed,
            scan(scanner, [&*answer]),
            "{answer:?} in {pieces:?}"
        );
    });
}
