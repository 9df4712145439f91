//! From text to tokens and back.

use std::sync::Arc;
use std::thread;

use serde_json::json;
use tasuki_text::{ChatInput, Detokenizer, ModelText};

use super::{Folder, now, small_model};

#[test]
fn one_model_serves_many_threads() {
    let template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";
    let model = Folder::new("threads", &[("chat_template.jinja", template)]).load();
    let model = Arc::new(model);
    let threads: Vec<_> = (0..4)
        .map(|index| {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let content = format!("世界 {index} 🙂").repeat(20);
                let chat = ChatInput::new(json!([{"role": "user", "content": content}]), now());
                let text = model.render_chat(chat).expect("renders");
                let ids = model.encode(&text, false).expect("encodes");
                let mut detokenizer = Detokenizer::new(&model, true);
                let mut back: String = ids.iter().map(|id| detokenizer.push(&[*id])).collect();
                back.push_str(&detokenizer.finish());
                assert_eq!(back, content);
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
}

#[test]
fn tokens_have_bytes_and_text() {
    for name in ["byte_level", "byte_fallback"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        let text = "x 界🙂\n";
        let ids = model.encode(text, false).expect("encodes");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| model.token_bytes(*id)).collect();
        let bytes = String::from_utf8(bytes).expect("UTF-8");
        assert_eq!(bytes.trim_start(), text, "{name}");
        let half = ids
            .iter()
            .find(|id| model.token_text(**id).contains('\u{fffd}'));
        assert!(half.is_some(), "{name}: some token is part of a character");
    }
    let model = ModelText::load(&small_model("byte_level")).expect("the model loads");
    assert_eq!(model.token_text(2), "<|im_end|>");
    assert_eq!(model.token_piece(2).as_deref(), Some("<|im_end|>"));
    assert!(model.is_token(0) && !model.is_token(100_000));
    assert_eq!(model.token_bytes(100_000), Vec::<u8>::new());
}

#[test]
fn characters_are_never_split() {
    for name in ["byte_level", "byte_fallback", "metaspace", "wordpiece"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        let ids = model.encode("a 👩\u{200d}👧 界 z", false).expect("encodes");
        let mut detokenizer = Detokenizer::new(&model, false);
        let pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(&[*id])).collect();
        let lost = pieces.iter().find(|piece| piece.contains('\u{fffd}'));
        assert_eq!(lost, None, "{name}: {pieces:?}");
    }
}

#[test]
fn special_tokens_can_be_kept() {
    let model = ModelText::load(&small_model("byte_level")).expect("the model loads");
    let ids = model
        .encode("<|im_start|>x<|im_end|>", false)
        .expect("encodes");
    let kept = model.token_id("<|im_end|>").expect("a token");
    assert_eq!(
        (ids.len(), ids[2], model.is_special(ids[0])),
        (3, kept, true)
    );
    let mut detokenizer = Detokenizer::new(&model, true).keeping(Arc::new([kept]));
    assert_eq!(detokenizer.push(&ids), "x<|im_end|>");
    assert_eq!(model.token_id("no token"), None);
}

#[test]
fn unfinished_characters_come_out_as_replacements_at_the_end() {
    for name in ["byte_level", "byte_fallback"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        let mut ids = model.encode("界", false).expect("encodes");
        ids.pop();
        let mut detokenizer = Detokenizer::new(&model, false);
        assert_eq!(detokenizer.push(&ids).trim(), "", "{name}");
        let whole = model.decode(&ids, false).expect("decodes");
        assert_eq!(detokenizer.finish(), whole.trim_start(), "{name}");
    }
}

#[test]
fn text_goes_on_behind_a_prompt() {
    for name in ["byte_level", "byte_fallback"] {
        let model = ModelText::load(&small_model(name)).expect("the model loads");
        for prompt in ["a", "a\n", "a 🦀", "界🦀🦀"] {
            let ids = model.encode(prompt, false).expect("encodes");
            let all = model.encode(&format!("{prompt} x🦀"), false);
            let all = all.expect("encodes");
            let answer = all.strip_prefix(&ids[..]).expect("the prompt comes first");
            let last = &ids[ids.len().saturating_sub(8)..];
            let mut detokenizer = Detokenizer::new(&model, true).after(last);
            let text = detokenizer.push(answer) + &detokenizer.finish();
            assert_eq!(text, " x🦀", "{name}: {prompt:?}");
        }
        let crab = model.encode("a 🦀", false).expect("encodes");
        let (begun, rest) = crab.split_at(crab.len() - 1);
        let mut detokenizer = Detokenizer::new(&model, true).after(begun);
        let text = detokenizer.push(rest) + &detokenizer.finish();
        assert_eq!(text.trim_start(), "🦀", "{name}");
    }
}
