//! Faults of a request head that two readers could understand differently.

use http::StatusCode;

/// Reasons to refuse a request because of its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("the request has both Content-Length and Transfer-Encoding; send one of them")]
    LengthAndCoding,
    #[error("the request has more than one Content-Length; send one")]
    TwoLengths,
    #[error("Content-Length must be one decimal number")]
    Length,
    #[error("the only Transfer-Encoding served is one `chunked`")]
    Coding,
    #[error("a line of the request head ends with a bare LF; lines end with CRLF")]
    BareLf,
    #[error("a line of the request head is no header field")]
    Field,
    #[error("the request line is not `METHOD TARGET HTTP/1.1` with single spaces")]
    RequestLine,
    #[error("the method is not one of capital letters")]
    Method,
    #[error(
        "the request target is not valid: a path, or an http URL, of visible ASCII characters without a fragment; percent-encode others"
    )]
    Target,
    #[error("the request needs exactly one Host header")]
    HostCount,
    #[error("the Host header is not a host with an optional port")]
    Host,
    #[error("the Host header and the request target name different hosts")]
    HostDiffers,
    #[error("the only expectation served is `Expect: 100-continue`")]
    Expectation,
    #[error(
        "the request has passed here before: its Via has our name; look for a proxy that sends to itself"
    )]
    Loop,
    #[error("the request's head and body could be read in two ways; send it again on a new connection")]
    Unseen,
}

impl WireError {
    /// Returns the response status.
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Expectation => StatusCode::EXPECTATION_FAILED,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::Coding => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// Returns the label of the reason in metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::LengthAndCoding | Self::TwoLengths | Self::Length | Self::Coding | Self::Unseen => {
                "framing"
            }
            Self::BareLf | Self::Field | Self::RequestLine | Self::Method => "head",
            Self::Target => "target",
            Self::HostCount | Self::Host | Self::HostDiffers => "host",
            Self::Expectation => "expectation",
            Self::Loop => "loop",
        }
    }
}
