//! The event stream of the page: first an event with the id of this run of the program, then the number of
//! each picture. A browser that reads slowly gets only the latest number.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http::{Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use warden_admin::response::AdminBody;

use crate::answer::{PageContent, page_response, refusal_response};
use crate::files;
use crate::hub::PageSnapshot;
use crate::state::PageState;

/// Most viewers. Each browser tab is a viewer, and holds a connection.
const MAX_VIEWERS: usize = 64;
/// Interval of keep-alive events, so that a dead connection is detected.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Checks whether a viewer may still see the page.
pub(crate) type AccessCheck = Arc<dyn Fn() -> bool + Send + Sync>;

/// Streams picture numbers. The first event has this run's id, and a token for pages loaded before it.
pub(crate) fn picture_stream(page: &PageState, still: Option<AccessCheck>) -> Response<AdminBody> {
    if page.hub.viewers() >= MAX_VIEWERS {
        let why = format!(
            "{MAX_VIEWERS} viewers follow the page already, which is the limit: this one is not refreshed"
        );
        return refusal_response(StatusCode::SERVICE_UNAVAILABLE, &why);
    }
    let hub = &page.hub;
    let hello = json!({ "boot": hub.boot, "token": hub.token.masked(), "files": files::page_files().tag });
    // A browser that lost its connection reconnects after a second.
    let first = format!("retry: 1000\nevent: hello\ndata: {hello}\n\n");
    let following = follow_pictures(first, hub.subscribe(), page.admin.stop.clone(), still);
    page_response(StatusCode::OK, PageContent::Stream, StreamBody::new(following).boxed_unsync())
}

fn follow_pictures(
    first: String,
    pictures: watch::Receiver<Option<Arc<PageSnapshot>>>,
    stop: CancellationToken,
    still: Option<AccessCheck>,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> {
    stream::unfold((Some(first), pictures, stop, still), |(first, mut pictures, stop, still)| async move {
        if let Some(first) = first {
            return Some((data_frame(first), (None, pictures, stop, still)));
        }
        let text = tokio::select! {
            () = stop.cancelled() => return None,
            changed = pictures.changed() => {
                changed.ok()?;
                // Include the last event's id: browsers show events at once, but may delay other changes.
                let (number, event) =
                    pictures.borrow_and_update().as_ref().map_or((0, 0), |picture| (picture.number, picture.event));
                format!("event: picture\ndata: {number} {event}\n\n")
            }
            // Send an event instead of a comment, because scripts do not receive comments.
            () = tokio::time::sleep(KEEP_ALIVE_INTERVAL) => "event: still\ndata: \n\n".to_owned(),
        };
        // End the stream if the visitor has signed out, or the key has lost its right.
        if still.as_ref().is_some_and(|still| !still()) {
            return None;
        }
        Some((data_frame(text), (None, pictures, stop, still)))
    })
}

#[expect(clippy::unnecessary_wraps, reason = "the shape that a streamed body asks for")]
fn data_frame(text: String) -> Result<Frame<Bytes>, Infallible> {
    Ok(Frame::data(Bytes::from(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    #[tokio::test]
    async fn who_reads_slowly_is_told_the_latest_number_and_the_end_ends_it() {
        let sender = watch::Sender::new(None);
        let stop = CancellationToken::new();
        let mut stream =
            Box::pin(follow_pictures("hello\n\n".to_owned(), sender.subscribe(), stop.clone(), None));
        let mut next = async || {
            let frame = stream.next().await?.unwrap();
            Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
        };
        assert_eq!(next().await.as_deref(), Some("hello\n\n"));
        for number in 1..=1000 {
            sender.send_replace(Some(Arc::new(PageSnapshot::numbered(number))));
        }
        assert_eq!(next().await.as_deref(), Some("event: picture\ndata: 1000 0\n\n"));
        stop.cancel();
        assert_eq!(next().await, None);
    }
}
