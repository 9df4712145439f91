//! What other versions send must be readable as far as the version, or no refusal could name it.

use prost::Message;
use tasuki_wire::{PROTOCOL_VERSION, v1};

/// Of version 1: the role is a number in field 3.
const WORKER_INFO_OF_1: [u8; 13] = [
    0x08, 1, 0x12, 1, b'e', 0x18, 2, 0x22, 4, b't', b'i', b'n', b'y',
];

#[test]
fn information_of_version_1_is_readable() {
    let info = v1::WorkerInfo::decode(WORKER_INFO_OF_1.as_slice()).expect("readable");
    assert_eq!((info.protocol_version, info.engine_id.as_str()), (1, "e"));
    assert_eq!(info.role, None);
}

#[test]
fn field_3_stays_unused_for_routers_of_version_1() {
    let info = v1::WorkerInfo {
        protocol_version: PROTOCOL_VERSION,
        role: Some(v1::RoleSetting::default()),
        ..Default::default()
    };
    // One of another type there is an error of decoding instead of a refusal that names versions.
    let keys = [0x18, 0x1a];
    let encoded = info.encode_to_vec();
    assert_eq!(encoded[..2], [0x08, 2]);
    assert!(!keys.contains(&encoded[2]), "{encoded:?}");
}
