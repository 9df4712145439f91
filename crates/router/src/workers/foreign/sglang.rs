//! SGLang's disaggregation: both legs start at once with the same rooms, in which the two
//! workers meet.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde_json::value::{RawValue, to_raw_value};

use crate::foreign::events;
use crate::foreign::object::Object;
use crate::foreign::request::PromptLogprobs;

/// What a server tells of itself, by the newest name first: a later version may lack the older one.
pub const SERVER_INFO: [&str; 2] = ["/server_info", "/get_server_info"];
/// The same of its model.
pub const MODEL_INFO: [&str; 2] = ["/model_info", "/get_model_info"];

/// SGLang takes rooms of 63 bits.
const ROOM_BITS: u32 = 63;

/// Where the two legs meet.
#[derive(Debug, Clone, Copy)]
pub struct Meeting<'a> {
    /// Of the prefill worker.
    pub host: &'a str,
    pub port: u16,
    /// The attempt's name, the same for both legs.
    pub attempt: &'a str,
    /// `None`: a single sequence; `Some`: so many, as lists.
    pub rooms: Option<u32>,
}

/// What either leg gets: the client's request, and where they meet.
pub fn body(client: &Object, meeting: Meeting<'_>) -> Object {
    let Meeting {
        host,
        port,
        attempt,
        rooms,
    } = meeting;
    let mut body = client.clone();
    match rooms {
        None => {
            body.set("bootstrap_host", &host);
            body.set("bootstrap_port", &port);
            body.set("bootstrap_room", &room(attempt, 0));
        }
        Some(count) => {
            let rooms: Vec<u64> = (0..count).map(|index| room(attempt, index)).collect();
            body.set("bootstrap_host", &vec![host; rooms.len()]);
            body.set("bootstrap_port", &vec![port; rooms.len()]);
            body.set("bootstrap_room", &rooms);
        }
    }
    body
}

/// Both legs draw the same: attempts' names are random numbers of 128 bits.
fn room(attempt: &str, index: u32) -> u64 {
    let mut hasher = DefaultHasher::new();
    (attempt, index).hash(&mut hasher);
    hasher.finish() >> (u64::BITS - ROOM_BITS)
}

/// One of `count` ranks, for an attempt; both legs draw the same.
pub fn rank(attempt: &str, count: u32) -> u32 {
    u32::try_from(room(attempt, 0) % u64::from(count)).unwrap_or(0)
}

/// Whether decode's answer lacks the log probabilities of the prompt, which prefill has.
pub fn wants_prompt_logprobs(client: &Object) -> bool {
    client
        .get("return_logprob")
        .is_some_and(|value| value.get().contains("true"))
}

const LOGPROBS: &str = "input_token_logprobs";

/// Log probabilities of the prompts in prefill's whole answer.
pub fn prompt_logprobs(answer: &[u8], stream: bool) -> PromptLogprobs {
    let mut found: Vec<Vec<Box<RawValue>>> = Vec::new();
    let mut take = |position: usize, item: &Object| {
        let index = item.read("index").unwrap_or(position);
        let logprobs = item
            .read::<Object>("meta_info")
            .and_then(|meta| meta.read(LOGPROBS));
        if let Some(logprobs) = logprobs
            && index < 1 << 16
        {
            found.resize_with(found.len().max(index + 1), Vec::new);
            found[index] = logprobs;
        }
    };
    if stream {
        for item in events::data(answer).filter_map(|data| serde_json::from_slice(data).ok()) {
            take(0, &item);
        }
    } else if let Ok(items) = serde_json::from_slice::<Vec<Object>>(answer) {
        for (position, item) in items.iter().enumerate() {
            take(position, item);
        }
    } else if let Ok(item) = serde_json::from_slice(answer) {
        take(0, &item);
    }
    Arc::new(found)
}

/// Decode's answer, or one event of it, with prefill's log probabilities before its own.
pub fn merge(answer: &[u8], prefill: &PromptLogprobs) -> Option<Vec<u8>> {
    if let Ok(mut items) = serde_json::from_slice::<Vec<Object>>(answer) {
        for (position, item) in items.iter_mut().enumerate() {
            merge_item(item, position, prefill)?;
        }
        return serde_json::to_vec(&items).ok();
    }
    let mut item: Object = serde_json::from_slice(answer).ok()?;
    merge_item(&mut item, 0, prefill)?;
    Some(item.to_json())
}

/// The same for whole events.
pub fn merge_events(received: &[u8], prefill: &PromptLogprobs) -> Vec<u8> {
    let mut merged = Vec::with_capacity(received.len());
    for line in events::lines(received) {
        let data = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii);
        match data.and_then(|data| merge(data, prefill)) {
            Some(data) => {
                merged.extend_from_slice(b"data: ");
                merged.extend_from_slice(&data);
                merged.push(b'\n');
            }
            None => merged.extend_from_slice(line),
        }
    }
    merged
}

fn merge_item(item: &mut Object, position: usize, prefill: &PromptLogprobs) -> Option<()> {
    let mut meta: Object = item.read("meta_info")?;
    let index = item.read("index").unwrap_or(position);
    // Some versions have none of a prompt that they did not compute.
    let of_decode: Vec<Box<RawValue>> = match meta.has(LOGPROBS) {
        true => meta.read(LOGPROBS)?,
        false => Vec::new(),
    };
    let of_prefill = prefill.get(index)?;
    let all: Vec<&RawValue> = of_prefill
        .iter()
        .chain(&of_decode)
        .map(|item| &**item)
        .collect();
    meta.set_raw(LOGPROBS, to_raw_value(&all).ok()?);
    item.set("meta_info", &meta);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> Object {
        serde_json::from_str(text).expect("an object")
    }

    fn meeting(attempt: &str, rooms: Option<u32>) -> Meeting<'_> {
        Meeting {
            host: "10.0.0.1",
            port: 8998,
            attempt,
            rooms,
        }
    }

    #[test]
    fn both_legs_meet_in_rooms_of_their_own() {
        let client = object(r#"{"text":"a"}"#);
        let one = body(&client, meeting("r.0", None));
        assert_eq!(one.to_json(), body(&client, meeting("r.0", None)).to_json());
        let room: u64 = one.read("bootstrap_room").expect("a number");
        assert!(room < 1 << 63);
        assert_eq!(one.read("bootstrap_port"), Some(8998));
        let next: Option<u64> = body(&client, meeting("r.1", None)).read("bootstrap_room");
        assert_ne!(next, Some(room));
        let batch = body(&client, meeting("r.0", Some(3)));
        let mut rooms: Vec<u64> = batch.read("bootstrap_room").expect("a list");
        let hosts: Vec<String> = batch.read("bootstrap_host").expect("a list");
        assert_eq!(hosts, vec!["10.0.0.1"; 3]);
        assert_eq!(batch.read("bootstrap_port"), Some(vec![8998; 3]));
        rooms.sort_unstable();
        rooms.dedup();
        assert_eq!(rooms.len(), 3, "distinct");
    }

    #[test]
    fn prompt_logprobs_are_those_of_prefill_and_then_of_decode() {
        let prefill =
            br#"{"text":"","meta_info":{"input_token_logprobs":[[null,1,null],[-0.50,2,null]]}}"#;
        let told = prompt_logprobs(prefill, false);
        let decode =
            br#"{"text":"x","meta_info":{"id":"r","input_token_logprobs":[[-1.0,3,null]],"z":1}}"#;
        let merged = merge(decode, &told).expect("merged");
        let expected = r#"{"text":"x","meta_info":{"id":"r","input_token_logprobs":[[null,1,null],[-0.50,2,null],[-1.0,3,null]],"z":1}}"#;
        assert_eq!(String::from_utf8(merged).unwrap(), expected);
        let events = [&b"data: "[..], decode, b"\n\ndata: [DONE]\n\n"].concat();
        let merged = merge_events(&events, &told);
        let expected = format!("data: {expected}\n\ndata: [DONE]\n\n");
        assert_eq!(String::from_utf8(merged).unwrap(), expected);
    }

    #[test]
    fn decode_may_have_no_logprobs_of_the_prompt() {
        let prefill = br#"{"meta_info":{"input_token_logprobs":[[null,1,null]]}}"#;
        let told = prompt_logprobs(prefill, false);
        for decode in [
            r#"{"text":"x","meta_info":{}}"#,
            r#"{"text":"x","meta_info":{"input_token_logprobs":null}}"#,
        ] {
            let merged = merge(decode.as_bytes(), &told).expect("merged");
            let expected = r#"{"text":"x","meta_info":{"input_token_logprobs":[[null,1,null]]}}"#;
            assert_eq!(String::from_utf8(merged).unwrap(), expected);
        }
        let unknown = br#"{"meta_info":{"input_token_logprobs":"base64"}}"#;
        assert_eq!(merge(unknown, &told), None);
    }

    #[test]
    fn of_a_batch_each_prompt_has_its_own() {
        let item =
            |token| format!(r#"{{"meta_info":{{"input_token_logprobs":[[-1,{token},null]]}}}}"#);
        let told = prompt_logprobs(format!("[{},{}]", item(1), item(2)).as_bytes(), false);
        let merged = merge(format!("[{},{}]", item(3), item(4)).as_bytes(), &told);
        let both = |one, two| {
            format!(
                r#"{{"meta_info":{{"input_token_logprobs":[[-1,{one},null],[-1,{two},null]]}}}}"#
            )
        };
        let expected = format!("[{},{}]", both(1, 3), both(2, 4));
        assert_eq!(String::from_utf8(merged.unwrap()).unwrap(), expected);
        let streamed = br#"data: {"index":1,"meta_info":{"input_token_logprobs":[[-1,2,null]]}}"#;
        assert_eq!(prompt_logprobs(streamed, true).len(), 2);
    }
}
