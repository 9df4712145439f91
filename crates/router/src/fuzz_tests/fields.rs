//! Messages with other values in their fields.

use prost::Message as _;
use prost::bytes::{Buf, BufMut};
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};
use rand::Rng;
use rand::seq::IndexedRandom;
use tasuki_searches::Random;
use tasuki_wire::v1::WorkerMessage;

const NUMBERS: [u64; 10] = [
    0,
    1,
    2,
    15,
    16,
    255,
    1 << 31,
    u32::MAX as u64,
    i64::MAX as u64,
    u64::MAX,
];
const FLOATS: [f64; 6] = [0.0, -1.0, 1e300, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
const STRINGS: [&str; 5] = ["", "r.0", "r.1", "a", "wörd"];

/// The same message, with some fields changed, left out or repeated.
pub fn mutated(message: &WorkerMessage, random: &mut Random) -> WorkerMessage {
    let bytes = rewrite(&message.encode_to_vec(), random, 0);
    WorkerMessage::decode(&*bytes).unwrap_or_default()
}

fn rewrite(bytes: &[u8], random: &mut Random, depth: u32) -> Vec<u8> {
    let mut fields = Vec::new();
    let mut rest = bytes;
    while let Ok((tag, wire)) = decode_key(&mut rest) {
        let mut field = Vec::new();
        encode_key(tag, wire, &mut field);
        let changes = random.random_bool(0.15);
        let Some(()) = value(&mut rest, wire, changes, &mut field, random, depth) else {
            return bytes.to_vec();
        };
        fields.push(field);
    }
    let repeats = random.random_bool(0.1);
    if let Some(repeated) = fields.choose(random).filter(|_| repeats).cloned() {
        fields.push(repeated);
    }
    fields.concat()
}

/// Writes one value; `None`: these bytes are no fields.
fn value(
    rest: &mut &[u8],
    wire: WireType,
    changes: bool,
    field: &mut Vec<u8>,
    random: &mut Random,
    depth: u32,
) -> Option<()> {
    match wire {
        WireType::Varint => {
            let known = decode_varint(rest).ok()?;
            let number = NUMBERS.choose(random).copied().filter(|_| changes);
            encode_varint(number.unwrap_or(known), field);
        }
        WireType::SixtyFourBit => {
            let known = rest.try_get_u64_le().ok()?;
            let number = FLOATS.choose(random).filter(|_| changes);
            field.put_u64_le(number.map_or(known, |number| number.to_bits()));
        }
        WireType::ThirtyTwoBit => {
            let known = rest.try_get_u32_le().ok()?;
            let number = FLOATS.choose(random).filter(|_| changes);
            field.put_u32_le(number.map_or(known, |number| (*number as f32).to_bits()));
        }
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(rest).ok()?).ok()?;
            let inner = rest.get(..length)?;
            rest.advance(length);
            let text = STRINGS.choose(random).filter(|_| changes && depth > 1);
            let inner = match text {
                Some(text) => text.as_bytes().to_vec(),
                None => rewrite(inner, random, depth + 1),
            };
            encode_varint(inner.len() as u64, field);
            field.extend_from_slice(&inner);
        }
        WireType::StartGroup | WireType::EndGroup => return None,
    }
    if changes && random.random_bool(0.2) {
        field.clear();
    }
    Some(())
}
