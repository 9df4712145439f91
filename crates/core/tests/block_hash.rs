//! The golden block hashes that Python's tests read too.

use serde::Deserialize;
use tasuki_core::{BlockHash, BlockHasher, Identity, block_hashes};

#[derive(Deserialize)]
struct Case {
    name: String,
    identity: String,
    tenant: String,
    block_size: usize,
    tokens: Vec<u32>,
    root: String,
    hashes: Vec<String>,
}

fn hex(hash: BlockHash) -> String {
    hash.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn identity(text: &str) -> Identity {
    let bytes: Vec<u8> = (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal"))
        .collect();
    Identity::from_slice(&bytes).expect("16 bytes")
}

fn cases() -> Vec<Case> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/golden/block_hashes.json"
    );
    let text = std::fs::read_to_string(path).expect("the golden file");
    serde_json::from_str(&text).expect("golden cases")
}

#[test]
fn golden_values_hold() {
    let cases = cases();
    assert!(cases.len() >= 10);
    for case in cases {
        let identity = identity(&case.identity);
        let root = BlockHasher::new(&identity, &case.tenant).root();
        assert_eq!(hex(root), case.root, "{}", case.name);
        let hashes: Vec<String> =
            block_hashes(&identity, &case.tenant, case.block_size, &case.tokens)
                .into_iter()
                .map(hex)
                .collect();
        assert_eq!(hashes, case.hashes, "{}", case.name);
    }
}

#[test]
fn a_hash_names_all_that_came_before() {
    let identity = Identity([7; 16]);
    let one = block_hashes(&identity, "", 2, &[1, 2, 3, 4]);
    let other = block_hashes(&identity, "", 2, &[9, 2, 3, 4]);
    assert_ne!(one[1], other[1]);
    let tenant = block_hashes(&identity, "t", 2, &[1, 2, 3, 4]);
    assert!(one.iter().all(|hash| !tenant.contains(hash)));
}
