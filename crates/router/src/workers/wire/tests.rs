use super::*;
use crate::workers::testing::info as worker_info;

#[test]
fn a_workers_information_is_checked() {
    let mut short = worker_info("a", v1::Role::Mixed);
    short.identity = vec![1; 15];
    assert_eq!(info(short), Err(InfoError::Identity(15)));
    let unset = worker_info("a", v1::Role::Unspecified);
    assert_eq!(info(unset).map(|info| info.role), Ok(Role::Mixed));
}

#[test]
fn another_version_is_refused_with_both_versions() {
    for theirs in [1, tasuki_wire::PROTOCOL_VERSION + 1] {
        let mut other = worker_info("a", v1::Role::Mixed);
        other.protocol_version = theirs;
        let error = info(other).expect_err("another version").to_string();
        assert!(error.contains(&format!("version {theirs},")), "{error}");
        assert!(error.contains("this router 2:"), "{error}");
    }
}

#[test]
fn what_is_no_duration_counts_as_zero() {
    for value in [f64::INFINITY, f64::NAN, -1.0, 1e300] {
        assert_eq!(seconds(value), Duration::ZERO);
    }
    assert_eq!(seconds(0.25), Duration::from_millis(250));
}
