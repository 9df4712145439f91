//! vLLM with its NixlConnector: prefill runs to its end and answers with what decode needs to
//! pull the KV, which goes to decode unchanged.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tasuki_flow::Ticket;

use crate::foreign::object::Object;

pub const PARAMS: &str = "kv_transfer_params";

/// Why an answer of prefill hands nothing over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoTicket {
    #[error(
        "its answer has no kv_transfer_params: start it with --kv-transfer-config \
         '{{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_both\"}}', or list it without role"
    )]
    Missing,
    /// A decode worker that gets it would wait for ever, or end.
    #[error(
        "kv_transfer_params of its answer have no valid {0}: is it a version of vLLM other than \
         that of the decode workers?"
    )]
    Incomplete(&'static str),
}

/// What prefill gets: the client's request, for one token. Its answer is not used.
pub fn prefill_body(client: &Object, path: &str) -> Object {
    let mut body = one_token(client, path);
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    body.set(PARAMS, &params);
    body
}

/// What decode gets after it refused the client's request: the same for one token, so that it takes
/// the KV and prefill need not hold it. Its answer is not used.
pub fn release_body(client: &Object, path: &str, ticket: &Ticket) -> Object {
    decode_body(&one_token(client, path), ticket)
}

fn one_token(client: &Object, path: &str) -> Object {
    let mut body = client.clone();
    body.set("stream", &false);
    body.set("max_tokens", &1);
    if path.ends_with("/chat/completions") || body.has("max_completion_tokens") {
        body.set("max_completion_tokens", &1);
    }
    body.remove("stream_options");
    body.remove("min_tokens");
    // One that ends by its first token, and not by its length, hands nothing over.
    body.set("ignore_eos", &true);
    body.remove("stop_token_ids");
    body
}

/// What decode gets: the client's request, and what prefill answered.
pub fn decode_body(client: &Object, ticket: &Ticket) -> Object {
    let mut body = client.clone();
    let params = std::str::from_utf8(&ticket.0).ok();
    let params = params.and_then(|json| RawValue::from_string(json.to_owned()).ok());
    body.set_raw(PARAMS, params.expect("a ticket is JSON, see ticket()"));
    body
}

/// The ticket in prefill's answer.
///
/// # Errors
///
/// [`NoTicket`]: there is none, or one that must not be forwarded.
pub fn ticket(answer: &[u8]) -> Result<Ticket, NoTicket> {
    #[derive(Deserialize)]
    struct Whole<'a> {
        #[serde(borrow)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let whole = serde_json::from_slice::<Whole<'_>>(answer);
    let params = whole.ok().and_then(|whole| whole.kv_transfer_params);
    let params = params.ok_or(NoTicket::Missing)?.get();
    let fields: Object =
        serde_json::from_str(params).map_err(|_| NoTicket::Incomplete("object"))?;
    for (name, expected) in [("do_remote_prefill", true), ("do_remote_decode", false)] {
        if fields.read(name) != Some(expected) {
            return Err(NoTicket::Incomplete(name));
        }
    }
    for name in ["remote_engine_id", "remote_request_id", "remote_host"] {
        let text: Option<String> = fields.read(name);
        if text.is_none_or(|text| text.is_empty()) {
            return Err(NoTicket::Incomplete(name));
        }
    }
    let blocks: Option<Vec<&RawValue>> = fields.read("remote_block_ids");
    let port: Option<u16> = fields.read("remote_port");
    let degree: Option<u32> = fields.read("tp_size");
    for (name, valid) in [
        ("remote_block_ids", blocks.is_some()),
        ("remote_port", port.is_some_and(|port| port != 0)),
        ("tp_size", degree.is_some_and(|degree| degree != 0)),
    ] {
        if !valid {
            return Err(NoTicket::Incomplete(name));
        }
    }
    Ok(Ticket(params.as_bytes().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As captured of vLLM 0.32.
    const PARAMS: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"27aacf9c","remote_request_id":"chatcmpl-req-c1-89d05983","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":345,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}"#;

    fn object(text: &str) -> Object {
        serde_json::from_str(text).expect("an object")
    }

    fn text(object: &Object) -> String {
        String::from_utf8(object.to_json()).expect("UTF-8")
    }

    #[test]
    fn the_ticket_reaches_decode_byte_for_byte() {
        let answer = format!(r#"{{"choices":[],"kv_transfer_params":{PARAMS},"metrics":null}}"#);
        let ticket = ticket(answer.as_bytes()).expect("complete");
        let body = decode_body(&object(r#"{"model":"m","n":1.0}"#), &ticket);
        let expected = format!(r#"{{"model":"m","n":1.0,"kv_transfer_params":{PARAMS}}}"#);
        assert_eq!(text(&body), expected);
    }

    #[test]
    fn an_incomplete_ticket_is_none() {
        let all = object(PARAMS);
        for name in [
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "tp_size",
        ] {
            let mut without = all.clone();
            without.remove(name);
            let mut null = all.clone();
            null.set(name, &());
            for fields in [without, null] {
                let answer = format!(r#"{{"kv_transfer_params":{}}}"#, text(&fields));
                assert_eq!(ticket(answer.as_bytes()), Err(NoTicket::Incomplete(name)));
            }
        }
        for none in [r#"{"kv_transfer_params":null}"#, "{}", "no JSON"] {
            assert_eq!(ticket(none.as_bytes()), Err(NoTicket::Missing));
        }
        let list = br#"{"kv_transfer_params":[]}"#;
        assert_eq!(ticket(list), Err(NoTicket::Incomplete("object")));
    }

    #[test]
    fn prefill_is_asked_for_one_token_and_no_stream() {
        let client = object(
            r#"{"messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"min_tokens":4,"stop_token_ids":[7],"x":{"b":1,"a":2}}"#,
        );
        let params = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
        let chat = text(&prefill_body(&client, "/v1/chat/completions"));
        let expected = format!(
            r#"{{"messages":[],"stream":false,"max_tokens":1,"x":{{"b":1,"a":2}},"max_completion_tokens":1,"ignore_eos":true,{params}}}"#
        );
        assert_eq!(chat, expected);
        let completion = text(&prefill_body(&client, "/v1/completions"));
        assert!(!completion.contains("max_completion_tokens"));
    }
}
