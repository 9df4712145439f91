use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tasuki_text::ModelText;

use super::{Content, PromptMaker, Segment};
use crate::error::PlanError;
use crate::plan::{Api, Prompt, PromptForm};

/// A vocabulary of each kind with words in it.
const WITH_WORDS: [&str; 4] = ["byte_level", "metaspace", "split_regex", "wordpiece"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/text/models")
        .join(name)
}

fn model(path: &Path) -> ModelText {
    ModelText::load(path).expect("the model loads")
}

fn text_maker(name: &str) -> Result<PromptMaker, PlanError> {
    PromptMaker::text(Api::Completions, model(&folder(name)), &folder(name), 1)
}

fn id_maker(seed: u64) -> PromptMaker {
    let path = folder("byte_level");
    PromptMaker::tokens(Api::Completions, model(&path), &path, seed).expect("a maker")
}

/// A chat model whose template trims what users say.
fn chat_maker() -> PromptMaker {
    let path = tempfile::tempdir().expect("a folder");
    let file = "tokenizer.json";
    std::fs::copy(folder("byte_level").join(file), path.path().join(file)).expect("a tokenizer");
    let template = "{% for m in messages %}({{ m.role }}) {{ m.content | trim }}\n{% endfor %}> ";
    std::fs::write(path.path().join("chat_template.jinja"), template).expect("a template");
    PromptMaker::text(Api::Chat, model(path.path()), path.path(), 1).expect("a maker")
}

fn segment(stream: u64, tokens: u32) -> Segment {
    Segment { stream, tokens }
}

fn ids(prompt: Prompt) -> Vec<u32> {
    match prompt {
        Prompt::Tokens(tokens) => tokens,
        other => panic!("not token ids: {other:?}"),
    }
}

fn text(prompt: Prompt) -> String {
    match prompt {
        Prompt::Text(text) => text,
        Prompt::Messages(messages) => messages.into_iter().map(|(_, content)| content).collect(),
        other => panic!("no text: {other:?}"),
    }
}

#[test]
fn token_ids_are_ordinary_tokens() {
    let maker = id_maker(1);
    let (prompt, count) = maker.prompt(&[segment(1, 20_000)]);
    let Content::Ids { model, .. } = &maker.content else {
        panic!("not ids")
    };
    let drawn = ids(prompt);
    assert_eq!((drawn.len(), count), (20_000, Some(20_000)));
    let is_ordinary = |id: &u32| {
        model.is_token(*id) && !model.is_special(*id) && !model.eos_token_ids().contains(id)
    };
    assert!(drawn.iter().all(is_ordinary));
    let mut distinct = drawn;
    distinct.sort_unstable();
    distinct.dedup();
    #[allow(clippy::cast_possible_truncation)]
    let ordinary = (0..model.vocab_size() as u32).filter(is_ordinary).count();
    assert_eq!(distinct.len(), ordinary);
    assert!(
        ordinary < model.vocab_size(),
        "the model has special tokens"
    );
}

#[test]
fn text_has_as_many_tokens_as_asked_for() {
    for name in WITH_WORDS {
        let maker = text_maker(name).unwrap();
        for tokens in [5, 6, 50, 333, 4000] {
            let (prompt, count) = maker.prompt(&[segment(u64::from(tokens), tokens)]);
            let (_, counted) = maker.counted(prompt);
            assert_eq!((count, counted), (Some(tokens), Some(tokens)), "{name}");
        }
    }
}

#[test]
fn chats_count_the_template() {
    let maker = chat_maker();
    for tokens in [20, 21, 400] {
        let (prompt, count) =
            maker.prompt(&[segment(3, tokens / 2), segment(4, tokens - tokens / 2)]);
        assert!(matches!(&prompt, Prompt::Messages(messages) if messages[0].0 == "user"));
        let (_, counted) = maker.counted(prompt);
        assert_eq!((count, counted), (Some(tokens), Some(tokens)));
    }
    let error = maker.check_length(3).unwrap_err();
    assert!(matches!(error, PlanError::TooShort { tokens: 3, least, .. } if least > 3));
    let message = error.to_string();
    assert!(message.contains("a prompt of 3 tokens"), "{message}");
}

#[test]
fn a_vocabulary_whose_words_run_together_is_refused() {
    for name in ["byte_fallback", "llama_class"] {
        let error = text_maker(name).unwrap_err();
        assert!(matches!(error, PlanError::NoExactText { .. }), "{error}");
        assert!(error.to_string().contains("--prompt-as"), "{error}");
    }
}

#[test]
fn chats_have_no_token_ids() {
    let path = folder("byte_level");
    let error = PromptMaker::tokens(Api::Chat, model(&path), &path, 1).unwrap_err();
    assert!(error.to_string().contains("--prompt-as text"), "{error}");
}

#[test]
fn words_are_as_many_and_counted_by_the_server() {
    let maker = PromptMaker::words(Api::Completions, 1);
    let (prompt, count) = maker.prompt(&[segment(1, 30), segment(2, 12)]);
    assert_eq!((text(prompt).split(' ').count(), count), (42, None));
    assert_eq!(maker.form(), PromptForm::Words);
    let mut words = super::WORDS.to_vec();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), super::WORDS.len());
}

#[test]
fn a_next_turn_has_all_that_was_said() {
    let (first, _) = id_maker(1).prompt(&[segment(1, 10)]);
    let (second, count) = id_maker(1).follow(first.clone(), " token", segment(2, 7));
    let Content::Ids { model, .. } = id_maker(1).content else {
        panic!("not ids")
    };
    let answer = model.encode(" token", false).unwrap();
    let expected = [
        ids(first),
        answer.clone(),
        ids(id_maker(1).prompt(&[segment(2, 7)]).0),
    ];
    assert_eq!(ids(second), expected.concat());
    assert_eq!(count, Some(17 + u32::try_from(answer.len()).unwrap()));

    let maker = chat_maker();
    let (first, before) = maker.prompt(&[segment(1, 30)]);
    let (second, count) = maker.follow(first.clone(), "an answer", segment(2, 7));
    let (Prompt::Messages(first), Prompt::Messages(messages)) = (first, &second) else {
        panic!("not chats")
    };
    assert_eq!(messages[0], first[0]);
    assert_eq!(
        messages[1],
        ("assistant".to_owned(), "an answer".to_owned())
    );
    assert_eq!(messages[2].0, "user");
    assert_eq!(
        count, None,
        "left to the server: tokenizing would disturb the run"
    );
    let (_, counted) = maker.counted(second);
    assert!(counted.unwrap() >= before.unwrap() + 7);

    let maker = PromptMaker::words(Api::Completions, 1);
    let (first, _) = maker.prompt(&[segment(1, 3)]);
    let (second, count) = maker.follow(first.clone(), " and so", segment(2, 2));
    assert!(text(second).starts_with(&format!("{} and so\n", text(first))));
    assert_eq!(count, None);
}

static MAKERS: LazyLock<[PromptMaker; 4]> = LazyLock::new(|| {
    let words = PromptMaker::words(Api::Completions, 1);
    [
        id_maker(1),
        text_maker("byte_level").unwrap(),
        chat_maker(),
        words,
    ]
});

/// What a prompt is made of, in comparable units.
fn units(prompt: Prompt) -> Vec<String> {
    match prompt {
        Prompt::Tokens(tokens) => tokens.iter().map(u32::to_string).collect(),
        other => text(other).split(' ').map(str::to_owned).collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: tasuki_searches::count(256),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(tasuki_searches::seed(7)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn content_is_a_function_of_the_stream_and_short_is_the_beginning_of_long(
        stream in any::<u64>(), short in 20_u32..100, more in 0_u32..100, own in 20_u32..50
    ) {
        for maker in &*MAKERS {
            let (a, count) = maker.prompt(&[segment(stream, short)]);
            let (b, _) = maker.prompt(&[segment(stream, short + more)]);
            let (c, _) = maker.prompt(&[segment(stream, short), segment(!stream, own)]);
            let (a, b, c) = (units(a), units(b), units(c));
            prop_assert_eq!(&b[..a.len()], &a[..]);
            prop_assert_eq!(&c[..a.len()], &a[..]);
            prop_assert_eq!(c.len(), a.len() + own as usize);
            prop_assert_eq!(count.unwrap_or(short), short);
            let (other, _) = maker.prompt(&[segment(!stream, short)]);
            prop_assert_ne!(units(other), a);
        }
    }
}

#[test]
fn seeds_give_other_content() {
    let draw = |seed| id_maker(seed).prompt(&[segment(1, 50)]);
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}

#[test]
fn the_count_of_a_very_long_conversation_stays_at_its_largest_value() {
    let maker = PromptMaker::lengths(1);
    let (asked, _) = maker.prompt(&[segment(1, u32::MAX), segment(2, 7)]);
    let (_, count) = maker.follow(asked, "answer", segment(3, 7));
    assert_eq!(count, Some(u32::MAX));
}
