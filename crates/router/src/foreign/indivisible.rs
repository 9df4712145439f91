//! What two workers cannot serve together, one can.

use serde_json::value::RawValue;
use tasuki_core::Indivisible;

use super::object::Object;

/// `None`: two workers can serve it.
pub fn of(path: &str, body: &Object, choices: u32) -> Option<Indivisible> {
    if scores_echo(path, body) {
        Some(Indivisible::EchoLogprobs)
    } else if choices > 1 {
        Some(Indivisible::Choices)
    } else if scores_prompt(path, body) {
        Some(Indivisible::PromptLogprobs)
    } else if must_call(body) {
        Some(Indivisible::ForcedCall)
    } else if cuts_prompt(body) {
        Some(Indivisible::CutPrompt)
    } else {
        None
    }
}

/// Whether it asks for log probabilities of the prompt. vLLM has them only where it computes the
/// prompt: on a decode worker that pulls its KV they end the engine of some versions.
fn scores_prompt(path: &str, body: &Object) -> bool {
    // For chats with `echo` it asks for those of 0 alternatives by itself.
    let is_chat = path == "/v1/chat/completions";
    let scores = is_chat || body.has("logprobs") || body.has("top_logprobs");
    body.has("prompt_logprobs") || (echoes(body) && scores)
}

/// Whether it asks for those of a prompt that its answer repeats: in one list with the answer's
/// own, which SGLang's decode worker has to begin with what only prefill knows.
fn scores_echo(path: &str, body: &Object) -> bool {
    path == "/v1/completions" && echoes(body) && body.has("logprobs")
}

fn echoes(body: &Object) -> bool {
    // Engines read `1` and `"yes"` as true, too.
    let echo = body.get("echo").map(RawValue::get);
    !matches!(echo, None | Some("null" | "false"))
}

/// Whether the answer must be a call. vLLM's prefill worker parses the one token of its answer as a
/// whole call, and refuses the request.
fn must_call(body: &Object) -> bool {
    let choice = body.get("tool_choice").map(RawValue::get);
    !matches!(choice, None | Some("null" | r#""auto""# | r#""none""#))
}

/// Whether the prompt is cut to what `max_tokens` leaves of the context. vLLM's prefill worker, asked
/// for one token, would cut it elsewhere, and its KV would be that of other tokens.
fn cuts_prompt(body: &Object) -> bool {
    let most = body.get("truncate_prompt_tokens").map(RawValue::get);
    // Engines read `"-1"` as a number, too.
    most.is_some_and(|most| most.trim_start_matches('"').starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = "/v1/chat/completions";
    const COMPLETIONS: &str = "/v1/completions";

    #[test]
    fn what_needs_one_worker_is_known_by_its_fields() {
        for (path, more, whole) in [
            (COMPLETIONS, r#""prompt_logprobs":0"#, true),
            (COMPLETIONS, r#""prompt_logprobs":null"#, false),
            (COMPLETIONS, r#""echo":true,"logprobs":0"#, true),
            (COMPLETIONS, r#""echo":1,"top_logprobs":2"#, true),
            (COMPLETIONS, r#""echo":true"#, false),
            (COMPLETIONS, r#""echo":false,"logprobs":1"#, false),
            (CHAT, r#""echo":true"#, true),
            (CHAT, r#""echo":false,"logprobs":true"#, false),
            (CHAT, r#""tool_choice":"required""#, true),
            (CHAT, r#""tool_choice":{"type":"function"}"#, true),
            (CHAT, r#""tool_choice":"auto""#, false),
            (CHAT, r#""tool_choice":null"#, false),
            (CHAT, r#""truncate_prompt_tokens":-1"#, true),
            (COMPLETIONS, r#""truncate_prompt_tokens":100"#, false),
        ] {
            let body = serde_json::from_str(&format!("{{{more}}}")).expect("an object");
            assert_eq!(of(path, &body, 1).is_some(), whole, "{path} {more}");
        }
    }
}
