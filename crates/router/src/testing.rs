//! A model whose tokens are bytes, and a serving layer that follows a script.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::http::Method;
use futures::future::BoxFuture;
use serde_json::{Map, Value, json};
use tasuki_core::ModelId;
use tasuki_flow::TokenLogprob;
use tasuki_policy::NoPlacement;
use tasuki_text::ModelText;
use tokio::sync::mpsc;

use crate::app::{App, HttpSettings};
use crate::foreign::native::Asked;
use crate::models::Models;
use crate::openai::{Generator, ReasoningParser, ToolParser};
use crate::serve::api::{
    Arrival, Event, Finish, Generating, Generation, ModelLimits, Timings, Unready,
};
use crate::serve::events::{self, EventSender};
use crate::workers::Catalog;

/// 256 bytes and the specials.
pub const VOCAB_SIZE: u32 = 258;
pub const EOS: u32 = 256;
pub const MAX_MODEL_LEN: u32 = 64;
pub const MODEL: &str = "org/bytes";

const TEMPLATE: &str = "{% for m in messages %}<|m|>{{ m.role[0] }}:{{ m.content }}\
    {% endfor %}{% if tools %}t{% endif %}{% if documents %}d{% endif %}\
    {% if add_generation_prompt %}<|m|>a:{% endif %}";

/// Token ids are byte values.
pub struct TestModel {
    pub text: Arc<ModelText>,
    _folder: tempfile::TempDir,
}

impl TestModel {
    pub fn new() -> Self {
        Self::with_template(Some(TEMPLATE))
    }

    pub fn with_template(template: Option<&str>) -> Self {
        Self::with_special_tokens(template, &[])
    }

    /// `more` special tokens have the ids from [`VOCAB_SIZE`] on.
    pub fn with_special_tokens(template: Option<&str>, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let special = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        };
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false,
            "trim_offsets": true, "use_regex": false});
        let mut added_tokens = vec![special(EOS, "<|eos|>"), special(257, "<|m|>")];
        added_tokens.extend((VOCAB_SIZE..).zip(more).map(|(id, text)| special(id, text)));
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added_tokens,
            "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": byte_vocabulary(), "merges": []},
        });
        let files = [
            ("tokenizer.json", tokenizer),
            (
                "tokenizer_config.json",
                template.map_or(json!({}), |t| json!({"chat_template": t})),
            ),
            ("config.json", json!({"eos_token_id": EOS})),
            ("generation_config.json", json!({"temperature": 0.5})),
        ];
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content.to_string()).unwrap();
        }
        Self {
            text: Arc::new(ModelText::load(folder.path()).unwrap()),
            _folder: folder,
        }
    }
}

impl TestModel {
    /// As the only model.
    pub fn only(&self) -> Models {
        Models::new(vec![(vec![MODEL.to_owned()], Arc::clone(&self.text))])
    }
}

/// The printable stand-in of each byte in byte-level vocabularies.
fn byte_vocabulary() -> Map<String, Value> {
    let mut next = 256;
    (0_u32..256)
        .map(|byte| {
            let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
            let code = if printable { byte } else { next };
            next += u32::from(!printable);
            (char::from_u32(code).unwrap().to_string(), byte.into())
        })
        .collect()
}

pub fn tokens_of(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

pub fn logprob(token: u32) -> TokenLogprob {
    TokenLogprob {
        token,
        logprob: -1.0,
        rank: 1,
        top: Vec::new(),
    }
}

type Script = dyn Fn(&Generation) -> Vec<Event> + Send + Sync;

/// Answers every generation with what the script says; keeps the channel open
/// if the script does not end it.
pub struct FakeGenerator {
    script: Box<Script>,
    pub seen: Mutex<Vec<Generation>>,
    /// The other ends of the generations that were started.
    pub started: Mutex<Vec<(EventSender, mpsc::UnboundedReceiver<u32>)>>,
    pub readiness: Result<(), Unready>,
    /// Models without a worker.
    pub down: Vec<ModelId>,
    pub http_errors: Mutex<Vec<(String, u16, String)>>,
    pub last_decoded: Mutex<Option<Instant>>,
}

impl FakeGenerator {
    pub fn new(script: impl Fn(&Generation) -> Vec<Event> + Send + Sync + 'static) -> Self {
        Self {
            script: Box::new(script),
            seen: Mutex::default(),
            started: Mutex::default(),
            readiness: Ok(()),
            down: Vec::new(),
            http_errors: Mutex::default(),
            last_decoded: Mutex::default(),
        }
    }

    /// Every choice says `text`, one token an event, as far as allowed.
    pub fn saying(text: &'static str) -> Self {
        Self::new(move |generation| say(generation, text))
    }

    pub fn down(reason: NoPlacement) -> Self {
        Self {
            readiness: Err(Unready::Workers(reason.into())),
            ..Self::saying("")
        }
    }
}

/// The events of a generation that says `text` and then stops by EOS.
pub fn say(generation: &Generation, text: &str) -> Vec<Event> {
    let mut events = Vec::new();
    if generation.sampling.prompt_logprobs.is_some() {
        let known = generation.prompt[1..].iter().copied().map(logprob);
        events.push(Event::PromptLogprobs(known.collect()));
    }
    let mut tokens = tokens_of(text);
    tokens.push(EOS);
    let limit = generation.sampling.max_tokens as usize;
    let cut = tokens.len() > limit;
    tokens.truncate(limit);
    for (position, token) in tokens.iter().enumerate() {
        for choice in 0..generation.n {
            let wanted = generation.sampling.logprobs;
            events.push(Event::Tokens {
                choice,
                tokens: vec![*token],
                logprobs: wanted.map(|_| logprob(*token)).into_iter().collect(),
                finish: (position + 1 == tokens.len()).then_some(if cut {
                    Finish::Length
                } else {
                    Finish::Stop
                }),
            });
        }
    }
    events.push(Event::Done(Box::new(Timings {
        total: Duration::from_millis(12),
        cached_prompt_tokens: 3,
        prefill_worker: "p0".into(),
        ..Timings::default()
    })));
    events
}

impl Generator for FakeGenerator {
    fn generate(&self, generation: Generation, _: Arrival) -> Generating {
        let (event_sender, events) = events::channel(generation.n);
        let (stop, stops) = mpsc::unbounded_channel();
        for event in (self.script)(&generation) {
            event_sender.send(event);
        }
        self.seen.lock().unwrap().push(generation);
        self.started.lock().unwrap().push((event_sender, stops));
        Generating {
            events,
            stop,
            account: Arc::default(),
            work: None,
        }
    }

    fn limits(&self, model: ModelId) -> Option<ModelLimits> {
        self.readiness(Some(model)).is_ok().then_some(ModelLimits {
            max_model_len: MAX_MODEL_LEN,
            common_len: MAX_MODEL_LEN,
            vocab_size: VOCAB_SIZE,
        })
    }

    fn readiness(&self, model: Option<ModelId>) -> Result<(), Unready> {
        if model.is_some_and(|model| self.down.contains(&model)) {
            return Err(Unready::Workers(NoPlacement::NoWorker.into()));
        }
        self.readiness
    }

    fn last_decoded(&self, _: ModelId) -> Option<Instant> {
        *self.last_decoded.lock().unwrap()
    }

    fn catalog(&self) -> Arc<Catalog> {
        Arc::default()
    }

    fn ask_sglang(&self, _: Method, _: &'static [&'static str]) -> BoxFuture<'_, Vec<Asked>> {
        Box::pin(async { Vec::new() })
    }

    fn flush_caches(&self) -> usize {
        usize::from(self.readiness.is_ok())
    }

    fn count_resumed(&self) {}

    fn metrics_text(&self) -> String {
        "# EOF\n".to_owned()
    }

    fn count_http_error(&self, path: &str, status: u16, reason: &str) {
        let mut counted = self.http_errors.lock().unwrap();
        counted.push((path.to_owned(), status, reason.to_owned()));
    }
}

pub fn settings() -> HttpSettings {
    HttpSettings {
        allow_priority: true,
        foreign_aliases: Vec::new(),
        tenant_header: None,
        max_body_bytes: 4096,
        body_timeout: Duration::from_secs(30),
        max_concurrent_requests: 4,
        request_timeout: Duration::from_secs(600),
        max_answer_bytes: 1 << 20,
        heartbeat: Duration::from_secs(600),
        allow_chat_template: false,
        tool_parser: ToolParser::Auto,
        reasoning_parser: ReasoningParser::Auto,
    }
}

pub fn app(generator: Arc<FakeGenerator>) -> Arc<App> {
    Arc::new(App::new(generator, TestModel::new().only(), settings()))
}
