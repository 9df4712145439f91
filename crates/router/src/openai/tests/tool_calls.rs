use std::sync::Arc;

use serde_json::{Value, json};

use super::post;
use crate::app::{App, HttpSettings};
use crate::openai::{ReasoningParser, ToolParser};
use crate::serve::api::{Event, Finish, Generation};
use crate::testing::{EOS, FakeGenerator, TestModel, VOCAB_SIZE, say, settings, tokens_of};

const PATH: &str = "/v1/chat/completions";
const TEMPLATE: &str =
    "{# <tool_call> </think> #}{% if tools %}t{% endif %}{{ messages[0].content }}";
const ANSWER: &str = "<think>\nhm\n</think>\n\nI look.<tool_call>\n{\"name\": \"f\", \"arguments\": \
    {\"x\": \"ü\"}}\n</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>";

fn app_with(settings: HttpSettings, script: fn(&Generation) -> Vec<Event>) -> Arc<App> {
    let model = TestModel::with_template(Some(TEMPLATE));
    let generator = Arc::new(FakeGenerator::new(script));
    Arc::new(App::new(generator, model.only(), settings))
}

/// Says the answer to its end: it is longer than the fake model's context.
fn answers(generation: &Generation) -> Vec<Event> {
    say_all(generation, ANSWER)
}

fn say_all(generation: &Generation, text: &str) -> Vec<Event> {
    let mut generation = generation.clone();
    generation.sampling.max_tokens = 1000;
    say(&generation, text)
}

fn request(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}]});
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

async fn choices(app: &Arc<App>, more: Value) -> Vec<Value> {
    let answer = post(app, PATH, request(more)).await;
    let body = answer.json();
    body["choices"].as_array().expect(&answer.text).clone()
}

/// Takes the ids out of the calls of a message, which must all differ.
fn take_ids(message: &mut Value) -> Vec<String> {
    let calls = message["tool_calls"].as_array_mut().unwrap();
    let ids: Vec<String> = calls
        .iter_mut()
        .map(|call| call.as_object_mut().unwrap().remove("id").unwrap())
        .map(|id| id.as_str().unwrap().to_owned())
        .collect();
    for (at, id) in ids.iter().enumerate() {
        assert!(!ids[..at].contains(id), "{ids:?}");
    }
    ids
}

fn expected_calls() -> Value {
    json!([
        {"type": "function", "function": {"name": "f", "arguments": "{\"x\": \"ü\"}"}},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}},
    ])
}

#[tokio::test]
async fn a_message_has_reasoning_content_and_calls() {
    let app = app_with(settings(), answers);
    let mut choices = choices(&app, json!({"n": 2})).await;
    assert_eq!(choices.len(), 2);
    for choice in &mut choices {
        assert_eq!(choice["finish_reason"], "tool_calls");
        let ids = take_ids(&mut choice["message"]);
        assert!(ids.iter().all(|id| id.starts_with("call_")), "{ids:?}");
        assert_eq!(
            choice["message"],
            json!({"role": "assistant", "content": "I look.", "refusal": null,
                "reasoning_content": "hm", "tool_calls": expected_calls()})
        );
    }
}

#[tokio::test]
async fn a_stream_has_the_same_in_deltas() {
    let app = app_with(settings(), answers);
    let body = request(json!({"n": 2, "stream": true}));
    let events = post(&app, PATH, body).await.events();
    for index in 0..2 {
        let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": []});
        let mut finishes = Vec::new();
        let choices = events.iter().map(|event| &event["choices"][0]);
        for choice in choices.filter(|choice| choice["index"] == index) {
            let delta = &choice["delta"];
            for name in ["content", "reasoning_content"] {
                let text = delta[name].as_str().unwrap_or_default();
                message[name] = json!(message[name].as_str().unwrap().to_owned() + text);
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let calls = message["tool_calls"].as_array_mut().unwrap();
                let mut call = call.as_object().unwrap().clone();
                assert_eq!(call.remove("index").unwrap(), calls.len());
                calls.push(call.into());
            }
            assert!(finishes.is_empty(), "the finish is the last: {choice}");
            finishes.extend(choice["finish_reason"].as_str());
        }
        take_ids(&mut message);
        assert_eq!(message["tool_calls"], expected_calls());
        assert_eq!(message["content"], "I look.");
        assert_eq!(message["reasoning_content"], "hm");
        assert_eq!(finishes, ["tool_calls"]);
    }
}

#[tokio::test]
async fn arguments_in_tags_have_the_types_of_the_tool() {
    const ANSWER: &str = "<tool_call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n\
        <parameter=y>\n8\n</parameter>\n</function>\n</tool_call>";
    let template = "{# <tool_call> <function= <parameter= #}{% if tools %}t{% endif %}hi";
    let model = TestModel::with_template(Some(template));
    let generator = Arc::new(FakeGenerator::new(|generation| say_all(generation, ANSWER)));
    let app = Arc::new(App::new(generator, model.only(), settings()));
    let parameters = json!({"properties": {"x": {"type": "integer"}, "y": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let arguments = json!({"name": "f", "arguments": "{\"x\": 7, \"y\": \"8\"}"});
    let body = |stream| request(json!({"tools": [tool], "stream": stream}));
    let whole = post(&app, PATH, body(false)).await.json();
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"], arguments);
    assert_eq!(message["content"], Value::Null);
    let events = post(&app, PATH, body(true)).await.events();
    let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
    let calls: Vec<&Value> = deltas
        .filter(|delta| !delta["tool_calls"].is_null())
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0]["tool_calls"][0]["function"], arguments);
}

#[tokio::test]
async fn templates_of_llama_get_past_answers_with_an_empty_list_of_calls() {
    let template = "{% for m in messages %}{% if 'tool_calls' in m %}{% if not \
        m.tool_calls|length == 1 %}{{ raise_exception('single tool-calls') }}{% endif %}{% endif %}\
        {{ m.content }}{% endfor %}";
    let model = TestModel::with_template(Some(template));
    let generator = Arc::new(FakeGenerator::saying("ok"));
    let app = Arc::new(App::new(generator, model.only(), settings()));
    let messages = json!([{"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "user", "content": "b"}]);
    let answer = post(&app, PATH, json!({"messages": messages})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test]
async fn content_is_null_beside_calls_only() {
    let app = app_with(settings(), |generation| {
        say_all(generation, "\n<tool_call>{\"name\":\"g\"}</tool_call>\n")
    });
    let choice = &choices(&app, json!({})).await[0];
    assert_eq!(choice["message"]["content"], Value::Null);
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert!(choice["message"].get("reasoning_content").is_none());
}

#[tokio::test]
async fn an_answer_that_was_cut_is_content() {
    let app = app_with(settings(), |generation| {
        say(generation, "<tool_call>{\"name\":\"g\"}</tool_call>")
    });
    for stream in [false, true] {
        let body = request(json!({"max_tokens": 15, "stream": stream}));
        let answer = post(&app, PATH, body).await;
        if stream {
            let events = answer.events();
            let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
            let text: String = deltas.filter_map(|d| d["content"].as_str()).collect();
            assert_eq!(text, "<tool_call>{\"na");
            let last = &events.last().unwrap()["choices"][0];
            assert_eq!(last["finish_reason"], "length");
        } else {
            let choice = &answer.json()["choices"][0];
            assert_eq!(choice["message"]["content"], "<tool_call>{\"na");
            assert_eq!(choice["finish_reason"], "length");
        }
    }
}

#[tokio::test]
async fn the_prompt_may_begin_the_reasoning() {
    let app = app_with(settings(), |generation| say(generation, "hm</think>\nYes"));
    for (prompt, content, reasoning) in [
        ("<think>\n", "Yes", json!("hm")),
        ("x", "hm</think>\nYes", Value::Null),
    ] {
        let messages = json!([{"role": "user", "content": prompt}]);
        let more = json!({"messages": messages, "tools": null});
        let message = &choices(&app, more).await[0]["message"];
        assert_eq!(message["content"], content);
        assert_eq!(message["reasoning_content"], reasoning);
    }
}

#[tokio::test]
async fn text_stays_text_where_nobody_asks_for_calls() {
    let think_off = HttpSettings {
        reasoning_parser: ReasoningParser::None,
        ..settings()
    };
    let all_off = HttpSettings {
        tool_parser: ToolParser::None,
        ..think_off.clone()
    };
    for (settings, more) in [
        (think_off.clone(), json!({"tools": null})),
        (think_off.clone(), json!({"tools": []})),
        (think_off, json!({"tool_choice": "none"})),
        (all_off, json!({})),
    ] {
        let app = app_with(settings, answers);
        let choice = &choices(&app, more).await[0];
        assert_eq!(choice["finish_reason"], "stop");
        let message = json!({"role": "assistant", "content": ANSWER, "refusal": null});
        assert_eq!(choice["message"], message);
    }
}

#[tokio::test]
async fn tokens_whose_text_is_held_back_have_their_chunks() {
    let app = app_with(settings(), answers);
    let body = request(json!({"stream": true, "logprobs": true, "return_token_ids": true}));
    let events = post(&app, PATH, body).await.events();
    let choices = || events.iter().map(|event| &event["choices"][0]);
    let ids: Vec<&Value> = choices()
        .filter_map(|choice| choice["token_ids"].as_array())
        .flatten()
        .collect();
    let mut expected = tokens_of(ANSWER);
    let logprobs: Vec<&Value> = choices()
        .filter_map(|choice| choice["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    assert_eq!(logprobs.len(), expected.len());
    expected.push(EOS);
    assert_eq!(ids, expected);
    // After the role, the first byte of the mark.
    let held = choices().nth(1).unwrap();
    assert_eq!(held["delta"], json!({}));
    assert_eq!(held["token_ids"], json!(tokens_of("<")));
}

#[tokio::test]
async fn marks_may_be_special_tokens() {
    let template = "{{ messages[0].content }}{% if tools %}t{% endif %}{# [TOOL_CALLS] #}";
    let model = TestModel::with_special_tokens(Some(template), &["[TOOL_CALLS]"]);
    let generator = FakeGenerator::new(|_| {
        let mut tokens = vec![VOCAB_SIZE];
        tokens.extend(tokens_of("[{\"name\":\"f\",\"arguments\":{}}]"));
        // Another special token, which has no text.
        tokens.extend([257, EOS]);
        vec![
            Event::Tokens {
                choice: 0,
                tokens,
                logprobs: Vec::new(),
                finish: Some(Finish::Stop),
            },
            Event::Done(Default::default()),
        ]
    });
    let app = Arc::new(App::new(Arc::new(generator), model.only(), settings()));
    let mut with_tools = choices(&app, json!({})).await.remove(0);
    let ids = take_ids(&mut with_tools["message"]);
    assert!(ids[0].len() == 9 && ids[0].chars().all(|c| c.is_ascii_alphanumeric()));
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    assert_eq!(with_tools["message"]["tool_calls"], call);
    assert_eq!(with_tools["message"]["content"], Value::Null);
    let without = &choices(&app, json!({"tools": null})).await[0]["message"];
    assert_eq!(without["content"], "[{\"name\":\"f\",\"arguments\":{}}]");
}

#[tokio::test]
async fn templates_of_deepseek_get_past_arguments_as_text() {
    let template = "{% for m in messages %}{% if m['content'] is none %}\
        {% for tool in m['tool_calls'] %}{{ tool['function']['name'] + ':' + \
        tool['function']['arguments'] + ';' }}{% endfor %}{% endif %}{% endfor %}";
    let model = TestModel::with_template(Some(template));
    let generator = Arc::new(FakeGenerator::saying("ok"));
    let app = Arc::new(App::new(
        Arc::clone(&generator) as _,
        model.only(),
        settings(),
    ));
    let call = |name, arguments| json!({"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}});
    let body = json!({"messages": [{"role": "assistant", "content": null,
        "tool_calls": [call("f", "{\"a\": 1}"), call("g", "")]}]});
    let answer = post(&app, PATH, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let prompt = generator.seen.lock().unwrap()[0].prompt.clone();
    assert_eq!(*prompt, *tokens_of("f:{\"a\": 1};g:{};"));
}
