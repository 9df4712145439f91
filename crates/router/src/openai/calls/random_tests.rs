//! Answers made of marks and pieces of JSON at random.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::format::{DEEPSEEK, GLM, HERMES, LLAMA, MISTRAL, QWEN_CODER};
use super::scanner::Reasoning;
use super::tests::{marks, scan};

#[test]
fn random_answers_are_the_same_however_they_are_cut() {
    const FRAGMENTS: [&str; 30] = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<think>",
        "</think>",
        "{\"name\":\"a\",\"arguments\":{}}",
        "{}",
        "[",
        "]",
        "{",
        "\"",
        "\\",
        ";",
        " ",
        "\n",
        "wörd",
        "<function=a>",
        "</function>",
        "<parameter=b>",
        "</parameter>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ];
    let reasonings = [Reasoning::Ignored, Reasoning::Marked, Reasoning::Begun];
    let formats = [
        None,
        Some(&HERMES),
        Some(&QWEN_CODER),
        Some(&GLM),
        Some(&MISTRAL),
        Some(&LLAMA),
        Some(&DEEPSEEK),
    ];
    for seed in 0..5_000 {
        let mut random = StdRng::seed_from_u64(seed);
        let length = random.random_range(0..12);
        let fragments = (0..length).map(|_| FRAGMENTS[random.random_range(0..FRAGMENTS.len())]);
        let answer: String = fragments.collect();
        let mut rest = answer.as_str();
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let characters = random.random_range(1..20);
            let cut = rest
                .char_indices()
                .nth(characters)
                .map_or(rest.len(), |(at, _)| at);
            pieces.push(&rest[..cut]);
            rest = &rest[cut..];
        }
        for format in formats {
            for reasoning in reasonings {
                let reader = marks(format, reasoning);
                let whole = scan(&reader, [answer.as_str()]);
                assert_eq!(scan(&reader, pieces.iter().copied()), whole, "{answer:?}");
                if reasoning == Reasoning::Ignored && whole.calls.is_empty() {
                    assert_eq!(whole.content, answer, "nothing is lost");
                }
            }
        }
    }
}
