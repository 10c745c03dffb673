//! Which heads llama-server reads: it closes without a word over a line that is too long for it.

use http::request::Parts;

use crate::refusal::Refusal;

/// Bytes of a line of a request's head, its end included, that llama-server takes (`CPPHTTPLIB_MAX_LINE_LENGTH`).
const LINE_BYTES: usize = 32 * 1024;

/// Whether llama-server reads a request line with this target: it closes without a word over one that is longer.
pub(crate) fn fits_line(parts: &Parts) -> Result<(), Refusal> {
    // A target that begins with its query gets a slash.
    let target = parts.uri.path_and_query().map_or(1, |target| {
        let text = target.as_str();
        text.len() + usize::from(!text.starts_with('/'))
    });
    // `METHOD target HTTP/1.1` and the end of the line.
    if parts.method.as_str().len() + target + "  HTTP/1.1\r\n".len() > LINE_BYTES {
        return Err(Refusal::TargetTooLong { limit: LINE_BYTES });
    }
    Ok(())
}

/// The same for all lines of a head, as it goes to the backend.
pub(crate) fn fits_lines(parts: &Parts) -> Result<(), Refusal> {
    fits_line(parts)?;
    // `name: value` and the end of the line.
    let longest = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).max();
    if longest.is_some_and(|longest| longest > LINE_BYTES) {
        return Err(Refusal::LineTooLong { limit: LINE_BYTES });
    }
    Ok(())
}
