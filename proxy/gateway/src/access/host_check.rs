//! Checks that the host named in a request belongs to this server: see [`warden_policies::HostNames`].

use http::Version;
use http::header::{HOST, HeaderValue};
use http::request::Parts;
use http::uri::Authority;
use warden_policies::HostNames;

use crate::refusal::RequestRefusal;

/// Returns the host of a request as its client wrote it. An absolute target takes precedence over `Host`
/// (RFC 9112 section 3.2.2); an earlier check has refused requests in which the two differ.
pub(crate) fn requested_host(parts: &Parts) -> Option<&[u8]> {
    match parts.uri.authority() {
        Some(authority) => Some(authority.as_str().as_bytes()),
        None => parts.headers.get(HOST).map(HeaderValue::as_bytes),
    }
}

/// Refuses a request for another host. A request without a host cannot come from a browser and passes.
pub(crate) fn check_host(names: &HostNames, parts: &Parts) -> Result<(), RequestRefusal> {
    if *names == HostNames::Any {
        return Ok(());
    }
    match requested_host(parts).and_then(|host| Authority::try_from(host).ok()) {
        Some(host) if names.allow(host.host()) => Ok(()),
        Some(host) => Err(RequestRefusal::Name(host.host().to_owned())),
        None if parts.version < Version::HTTP_11 && !parts.headers.contains_key(HOST) => Ok(()),
        None => Err(RequestRefusal::Host),
    }
}
