//! A request body as the client sends it, decoded if it has a `Content-Encoding`. llama-server decodes
//! nothing, and the gateway cannot read a model name from compressed bytes.
//!
//! A few bytes can decode to very many. So a decoded body counts against the same limits as any other, and
//! may be at most [`MAX_DECODED_RATIO`] times as large as the bytes received. The common budget includes the
//! decoder's memory.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use async_compression::zstd::DParameter;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::io::AsyncRead;
use tokio_util::io::{StreamReader, poll_read_buf};

use crate::body::{BodyBudget, HeldPieces};
use crate::refusal::{BodyError, MAX_DECODED_RATIO, RequestRefusal};

/// Number of decoded bytes up to which the ratio to the received bytes is not checked.
const RATIO_FREE_BYTES: u64 = 1 << 20;

const DECODE_BYTES: usize = 16 << 10;

/// Maximum window of a zstd frame, as a power of two: the 8 MiB that RFC 9659 allows over HTTP.
const ZSTD_WINDOW_LOG: u32 = 23;

/// Memory of a decoder in bytes: its window, its current block, and its input.
const GZIP_BYTES: usize = 96 << 10;
const ZSTD_BYTES: usize = (1 << ZSTD_WINDOW_LOG) + (512 << 10);

pub(crate) enum RequestStream {
    Plain(Incoming),
    Decoded(Box<DecodedStream>),
}

pub(crate) struct DecodedStream {
    decoder: Pin<Box<dyn AsyncRead + Send>>,
    /// Number of bytes received from the client.
    sent: Arc<AtomicU64>,
    decoded: u64,
    is_over: bool,
    /// The decoder's memory, reserved in the budget.
    _memory: HeldPieces,
}

impl RequestStream {
    /// Removes `Content-Encoding` from the head and decodes the body as it arrives. Reads nothing yet.
    ///
    /// # Errors
    /// The coding is none of [`ACCEPTED_CODINGS`](crate::refusal::ACCEPTED_CODINGS), or the budget has no
    /// room for a decoder at the moment.
    pub(crate) fn open(
        headers: &mut HeaderMap,
        body: Incoming,
        budget: &BodyBudget,
    ) -> Result<Self, RequestRefusal> {
        if body.is_end_stream() || !headers.contains_key(CONTENT_ENCODING) {
            return Ok(Self::Plain(body));
        }
        let coding = parse_coding(headers)?;
        headers.remove(CONTENT_ENCODING);
        let memory = match coding {
            ContentCoding::Identity => return Ok(Self::Plain(body)),
            ContentCoding::Gzip => GZIP_BYTES,
            ContentCoding::Zstd => ZSTD_BYTES,
        };
        let memory = HeldPieces::reserved(budget.clone(), memory).ok_or(RequestRefusal::Busy)?;
        let sent = Arc::new(AtomicU64::new(0));
        let count = sent.clone();
        let counted = body.map_err(io::Error::other).map_frame(move |frame| {
            count.fetch_add(frame.data_ref().map_or(0, Bytes::len) as u64, Ordering::Relaxed);
            frame
        });
        let reader = StreamReader::new(counted.into_data_stream());
        // Both codings allow several members in a row. Any other bytes after a member are an error.
        let decoder: Pin<Box<dyn AsyncRead + Send>> = if coding == ContentCoding::Gzip {
            let mut decoder = GzipDecoder::new(reader);
            decoder.multiple_members(true);
            Box::pin(decoder)
        } else {
            let window = DParameter::window_log_max(ZSTD_WINDOW_LOG);
            let mut decoder = ZstdDecoder::with_params(reader, &[window]);
            decoder.multiple_members(true);
            Box::pin(decoder)
        };
        Ok(Self::Decoded(Box::new(DecodedStream {
            decoder,
            sent,
            decoded: 0,
            is_over: false,
            _memory: memory,
        })))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentCoding {
    Identity,
    Gzip,
    Zstd,
}

fn parse_coding(headers: &HeaderMap) -> Result<ContentCoding, RequestRefusal> {
    let named: Vec<&[u8]> = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case(b"identity"))
        .collect();
    match named[..] {
        [] => Ok(ContentCoding::Identity),
        [name] if name.eq_ignore_ascii_case(b"gzip") || name.eq_ignore_ascii_case(b"x-gzip") => {
            Ok(ContentCoding::Gzip)
        }
        [name] if name.eq_ignore_ascii_case(b"zstd") => Ok(ContentCoding::Zstd),
        _ => Err(RequestRefusal::Coding),
    }
}

impl DecodedStream {
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let mut piece = BytesMut::with_capacity(DECODE_BYTES);
        let read = ready!(poll_read_buf(self.decoder.as_mut(), context, &mut piece));
        let fault = match read {
            Ok(0) => None,
            Ok(bytes) => {
                self.decoded = self.decoded.saturating_add(bytes as u64);
                let most = self.sent.load(Ordering::Relaxed).saturating_mul(MAX_DECODED_RATIO);
                if self.decoded <= most.max(RATIO_FREE_BYTES) {
                    return Poll::Ready(Some(Ok(piece.freeze())));
                }
                Some(BodyError::TooDense)
            }
            Err(error)
                if error.get_ref().and_then(|inner| inner.downcast_ref::<hyper::Error>()).is_some() =>
            {
                Some(BodyError::Broken)
            }
            Err(_) => Some(BodyError::Undecodable),
        };
        self.is_over = true;
        Poll::Ready(fault.map(Err))
    }
}

impl Body for RequestStream {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Plain(body) => Pin::new(body).poll_frame(context).map_err(|_| BodyError::Broken),
            Self::Decoded(body) => body.poll_piece(context).map_ok(Frame::data),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Plain(body) => body.is_end_stream(),
            Self::Decoded(body) => body.is_over,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Plain(body) => body.size_hint(),
            Self::Decoded(_) => SizeHint::new(),
        }
    }
}
