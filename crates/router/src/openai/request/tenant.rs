//! Whose request it is, and how urgent.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName};

use super::validate::{MAX_TENANT_BYTES, PRIORITY};
use crate::error::ApiError;

/// The tenant that a gateway's header names; without it, the empty name.
///
/// # Errors
/// A name that is too long, or no text.
pub fn of_header(headers: &HeaderMap, name: &HeaderName) -> Result<Arc<str>, ApiError> {
    let Some(value) = headers.get(name) else {
        return Ok("".into());
    };
    let text = value.to_str().map_err(|_| {
        ApiError::invalid(
            name.as_str(),
            format!("{name} is not made of visible ASCII."),
        )
    })?;
    bounded(name.as_str(), text)
}

/// The tenant that the request's own field `user` names.
///
/// # Errors
/// A name that is too long.
pub fn of_field(user: Option<&str>) -> Result<Arc<str>, ApiError> {
    bounded("user", user.unwrap_or_default())
}

/// Less goes first; 0 unless the request says otherwise.
///
/// # Errors
/// A number out of range, or one other than 0 where the router does not take them.
pub fn priority(given: Option<i64>, allowed: bool) -> Result<i32, ApiError> {
    let given = given.unwrap_or(0);
    let priority = i32::try_from(given).ok().filter(|p| PRIORITY.contains(p));
    let Some(priority) = priority else {
        let (least, most) = (PRIORITY.start(), PRIORITY.end());
        return Err(ApiError::invalid(
            "priority",
            format!("priority is {given}; it must be between {least} and {most}."),
        ));
    };
    if priority != 0 && !allowed {
        return Err(ApiError::unsupported(
            "priority",
            format!(
                "priority is {priority}; the router was not started with \
                 --allow-request-priority, so it can only be 0."
            ),
        ));
    }
    Ok(priority)
}

fn bounded(param: &str, name: &str) -> Result<Arc<str>, ApiError> {
    match name.len() {
        0..=MAX_TENANT_BYTES => Ok(name.into()),
        bytes => Err(ApiError::invalid(
            param,
            format!("{param} has {bytes} bytes; the limit is {MAX_TENANT_BYTES}."),
        )),
    }
}
