//! Whom a request is for, by the host that its client named, and whether that is us: see [`warden_policies::Names`].

use http::Version;
use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use warden_policies::Names;

use crate::errors::Refusal;

/// Refuses a request for a name that is not ours. A client that names nobody is no browser.
pub(crate) fn check(names: &Names, parts: &Parts) -> Result<(), Refusal> {
    if *names == Names::Any {
        return Ok(());
    }
    // RFC 9112 section 3.2.2: an absolute target counts, whatever `Host` says; that they agree was checked before.
    let in_field = || {
        let field = parts.headers.get(HOST)?;
        Authority::try_from(field.as_bytes()).ok()
    };
    let host = match parts.uri.authority() {
        Some(authority) => Some(authority.clone()),
        None => in_field(),
    };
    match host {
        Some(host) if names.allow(host.host()) => Ok(()),
        Some(host) => Err(Refusal::Name(host.host().to_owned())),
        None if parts.version < Version::HTTP_11 && !parts.headers.contains_key(HOST) => Ok(()),
        None => Err(Refusal::Host),
    }
}
