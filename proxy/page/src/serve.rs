//! Answers requests for the page: checks them, and makes the requested view, file or action.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use maud::{Markup, html};
use warden_admin::query::QueryPairs;
use warden_admin::requests::RequestFilter;
use warden_admin::response::AdminBody;
use warden_admin::series::answer::{MemoryData, list_series};
use warden_admin::series::ask::SeriesQuery;
use warden_admin::server::AdminPage;
use warden_admin::state::AdminState;
use warden_supervisor::{WorkKind, run_job};

use crate::answer::{self, PageContent, part_response, refusal_response, uncached_response};
use crate::guard::{self, PageRefusal};
use crate::hub::{PageSnapshot, RenderedView};
use crate::live::{self, AccessCheck};
use crate::state::PageState;
use crate::view::{PageRoute, PageView, parse_path};
use crate::{act, builds, configuration, events, files, frame, memory, overview, requests};

/// Size limit of a form in bytes: a form has one action, one name, one address.
const MAX_FORM_BYTES: usize = 64 << 10;
/// Time limit for reading a form, which a browser sends at once.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);
/// Size limit of a query in bytes: a query has a filter and names.
const MAX_QUERY_BYTES: usize = 8 << 10;

#[derive(Clone, Default)]
pub(crate) struct PageVisitor {
    /// Name for events and the ledger.
    pub(crate) who: Option<String>,
    /// Name of the session's key, if there is a session.
    pub(crate) key: Option<Arc<str>>,
    /// Checks whether the visitor may still see the page; streams call it repeatedly.
    pub(crate) still_allowed: Option<AccessCheck>,
}

impl AdminPage for PageState {
    fn has_path(&self, path: &str) -> bool {
        parse_path(path).is_some()
    }

    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        peer: Option<IpAddr>,
    ) -> BoxFuture<'static, Response<AdminBody>> {
        Box::pin(async move { serve(&self, request, peer).await })
    }

    fn follow_fleet(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { self.hub.run(&self.admin).await })
    }

    fn finish_actions(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.hub.work.close();
            self.hub.work.wait().await;
        })
    }
}

/// Answers a request to the admin listeners. `peer`: the client; `None` on the admin socket.
async fn serve(page: &PageState, request: Request<Incoming>, peer: Option<IpAddr>) -> Response<AdminBody> {
    let uri = request.uri().clone();
    let way = parse_path(uri.path()).unwrap_or(PageRoute::Nothing);
    let method = request.method().clone();
    if let Err(refused) = guard::check_request(&method, request.headers(), way.is_document()) {
        return refusal_response(StatusCode::FORBIDDEN, &refused);
    }
    let visitor = PageVisitor { who: Some(act::caller_name(peer)), ..PageVisitor::default() };
    serve_allowed(page, way, request, visitor).await
}

pub(crate) async fn serve_allowed(
    page: &PageState,
    way: PageRoute<'_>,
    request: Request<Incoming>,
    visitor: PageVisitor,
) -> Response<AdminBody> {
    let uri = request.uri().clone();
    let method = request.method().clone();
    let reads = method != Method::POST;
    if reads == matches!(way, PageRoute::Act | PageRoute::Cancel) {
        return refusal_response(StatusCode::METHOD_NOT_ALLOWED, &PageRefusal::Method);
    }
    let query = uri.query().unwrap_or_default();
    if query.len() > MAX_QUERY_BYTES {
        return refusal_response(
            StatusCode::URI_TOO_LONG,
            &format!("a query has {MAX_QUERY_BYTES} bytes at most"),
        );
    }
    match way {
        PageRoute::Root => answer::redirect("/page/"),
        PageRoute::View(view) => show_view(page, view, query, request.headers(), &visitor).await,
        PageRoute::Live => live::picture_stream(page, visitor.still_allowed),
        PageRoute::Act | PageRoute::Cancel => {
            run_action(page, request, visitor.who.as_deref(), way == PageRoute::Cancel).await
        }
        PageRoute::File(name) => match files::find_file(name) {
            Some(file) => answer::file_response(file, request.headers()),
            None => refusal_response(StatusCode::NOT_FOUND, &"there is no such file: load the page again"),
        },
        PageRoute::Nothing => {
            refusal_response(StatusCode::NOT_FOUND, &"there is no such view: /page/ leads to all of them")
        }
    }
}

/// Renders a view as a whole document, or with `part=1` only the refreshed part.
async fn show_view(
    page: &PageState,
    view: PageView,
    query: &str,
    headers: &HeaderMap,
    visitor: &PageVisitor,
) -> Response<AdminBody> {
    let asked = QueryPairs::lenient(Some(query));
    let admin = &page.admin;
    let picture = page.hub.picture(admin);
    let make = |content: &Markup| {
        let text = frame::refreshed_part(view, content, &picture.notices);
        RenderedView {
            gzip: files::gzip(text.as_bytes(), flate2::Compression::fast()),
            tag: files::content_hash(text.as_bytes()),
            plain: text.into(),
        }
    };
    let part = match view {
        PageView::Overview => {
            let wish = overview::OverviewQuery::from_query(&asked);
            let key = format!("{wish:?}");
            page.hub.render_once(&picture, &key, || make(&overview::overview_view(&picture, &wish)))
        }
        PageView::Memory => match memory_data(admin, query).await {
            Ok(Some(data)) if asked.get("file").is_some() => return answer::download_response(&data),
            Ok(Some(data)) => make(&memory::memory_view(&data)),
            Ok(None) => make(&memory_listing(admin).await),
            Err(why) => make(&unavailable_view(view, &why)),
        },
        other => make(&view_content(page, other, &asked, &picture).await),
    };
    if asked.get("fragment").is_some() {
        return part_response(&part, headers);
    }
    let subject = match view {
        PageView::Memory | PageView::Events | PageView::Logs => asked.get("model").unwrap_or_default(),
        _ => "",
    };
    let path = view.path();
    let here = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
    let token = page.hub.token.masked();
    let frame = frame::PageFrame {
        view,
        subject,
        here: &here,
        token: &token,
        boot: &page.hub.boot,
        signed_in: visitor.key.as_deref(),
        controls: view_controls(view, &asked, &picture),
    };
    let text = frame::page_document(&frame, std::str::from_utf8(&part.plain).unwrap_or_default());
    uncached_response(StatusCode::OK, PageContent::Page, text.into(), Some(headers))
}

fn view_controls(view: PageView, asked: &QueryPairs, picture: &PageSnapshot) -> Markup {
    let fleet = &picture.status.fleet;
    let models = || fleet.models.iter().chain(&fleet.canaries).map(|model| &model.name);
    match view {
        PageView::Overview => overview::overview_form(&overview::OverviewQuery::from_query(asked)),
        PageView::Events => events::EventFilter::from_query(asked).form(view.path(), models(), true),
        PageView::Logs => log_filter(asked, picture).form(view.path(), models(), false),
        PageView::Configuration => configuration::search_form(asked.get("q").unwrap_or_default()),
        PageView::Memory | PageView::Requests | PageView::Builds | PageView::Help => Markup::default(),
    }
}

/// Returns the filter for logs, which belong to one model. If the query names no model, the first is used.
fn log_filter(asked: &QueryPairs, picture: &PageSnapshot) -> events::EventFilter {
    let mut wish = events::EventFilter::from_query(asked);
    if wish.model.is_empty() {
        let first = picture.status.fleet.models.first();
        wish.model = first.map(|model| model.name.to_string()).unwrap_or_default();
    }
    wish
}

async fn view_content(
    page: &PageState,
    view: PageView,
    asked: &QueryPairs,
    picture: &Arc<PageSnapshot>,
) -> Markup {
    let admin = &page.admin;
    match view {
        PageView::Overview => overview::overview_view(picture, &overview::OverviewQuery::from_query(asked)),
        PageView::Events => {
            let all = admin.fleet.events().events;
            let wish = events::EventFilter::from_query(asked);
            // Render on another thread, because every text is searched for secrets.
            blocking(WorkKind::Pages, move || events::events_view(&all, &wish)).await.unwrap_or_default()
        }
        PageView::Logs => {
            let mut wish = log_filter(asked, picture);
            let lines = admin.fleet.logs(&wish.model).map(|tail| tail.lines);
            if lines.is_none() {
                wish.model.clear();
            }
            let lines = lines.unwrap_or_default();
            blocking(WorkKind::Pages, move || events::logs_view(&lines, &wish)).await.unwrap_or_default()
        }
        PageView::Configuration => {
            let told = admin.config.borrow().clone();
            // Render on another thread, because a thousand models have tens of thousands of settings.
            let text =
                blocking(WorkKind::Pages, move || told.configuration.map(|kept| (kept.text(), kept.pending)))
                    .await
                    .flatten();
            let (text, pending) = text.map_or((None, Vec::new()), |(text, pending)| (Some(text), pending));
            configuration::configuration_view(text.as_deref(), &pending, asked.get("q").unwrap_or_default())
        }
        PageView::Builds => {
            let data = std::path::PathBuf::from(&picture.status.instance.data_dir);
            let picture = picture.clone();
            // Render on another thread, because recognizing builds under all their names reads the disk.
            let view = move || builds::builds_view(&picture, &builds::StoredBuilds::read(&data), &data);
            blocking(WorkKind::StateFiles, view).await.unwrap_or_default()
        }
        PageView::Help => frame::help_view(),
        PageView::Requests => requests_view(page, asked),
        // This view was answered before, because it needs the unparsed query.
        PageView::Memory => Markup::default(),
    }
}

fn requests_view(page: &PageState, asked: &QueryPairs) -> Markup {
    let admin = &page.admin;
    let filter = RequestFilter { model: asked.get("model").map(str::to_owned), ..RequestFilter::default() };
    match admin.list_requests(&filter) {
        Ok(list) => requests::requests_view(&list, Some(&page.hub.shown_token)),
        Err(unknown) => unavailable_view(PageView::Requests, &unknown),
    }
}

/// Returns the recorded memory of the requested model; `None` if the query names no model.
async fn memory_data(admin: &AdminState, query: &str) -> Result<Option<MemoryData>, String> {
    let ask = SeriesQuery::from_query(Some(query), admin.records.series.policy())?;
    let Some(model) = &ask.model else { return Ok(None) };
    admin.memory_data(model, &ask).await.map(Some).map_err(|nothing| nothing.to_string())
}

async fn memory_listing(admin: &AdminState) -> Markup {
    match list_series(&admin.records.series).await {
        Ok(listed) => memory::listing_view(&listed, &admin.fleet.view()),
        Err(failed) => unavailable_view(PageView::Memory, &failed.to_string()),
    }
}

fn unavailable_view(view: PageView, why: &str) -> Markup {
    html! {
        h1 { (view.title()) }
        p { (why) }
    }
}

/// Runs `work` on a thread that serves no requests, because a disk may be slow.
async fn blocking<T: Send + 'static>(kind: WorkKind, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    run_job(kind, work)
        .await
        .inspect_err(|error| tracing::warn!(%error, "a part of the page is missing"))
        .ok()
}

/// Fails with the answer to send if the form is too large or arrives too slowly.
pub(crate) async fn read_form(request: Request<Incoming>) -> Result<QueryPairs, Box<Response<AdminBody>>> {
    let body = Limited::new(request.into_body(), MAX_FORM_BYTES).collect();
    let refused = |status, why: &dyn std::fmt::Display| Err(Box::new(refusal_response(status, why)));
    match tokio::time::timeout(FORM_TIMEOUT, body).await {
        Ok(Ok(form)) => Ok(QueryPairs::lenient(std::str::from_utf8(&form.to_bytes()).ok())),
        Ok(Err(_)) => {
            refused(StatusCode::PAYLOAD_TOO_LARGE, &format!("a form has {MAX_FORM_BYTES} bytes at most"))
        }
        Err(_) => refused(StatusCode::REQUEST_TIMEOUT, &"the form did not come within 10 s"),
    }
}

async fn run_action(
    page: &PageState,
    request: Request<Incoming>,
    who: Option<&str>,
    cancels: bool,
) -> Response<AdminBody> {
    let json = request.headers().get(header::ACCEPT).is_some_and(|accept| accept == "application/json");
    let form = match read_form(request).await {
        Ok(form) => form,
        Err(refused) => return *refused,
    };
    let ours = |said: &str| page.hub.token.matches(said);
    let who = who.unwrap_or("page").to_owned();
    let begun = if cancels {
        act::cancel_request(page, &form, ours, &who).map(|id| (id, PageView::Requests.path().to_owned()))
    } else {
        act::parse_action(&form, ours).and_then(|order| {
            let back = order.back.clone();
            Ok((act::start_action(page, order, who)?, back))
        })
    };
    match begun {
        Ok((id, _)) if json => uncached_response(
            StatusCode::ACCEPTED,
            PageContent::Json,
            format!("{{\"notice\":{id}}}\n").into(),
            None,
        ),
        Ok((_, back)) => answer::redirect(&back),
        Err(wrong) => {
            let status = match wrong {
                act::FormError::Refused(_) => StatusCode::FORBIDDEN,
                act::FormError::Unknown(_) => StatusCode::BAD_REQUEST,
                act::FormError::TooMany => StatusCode::TOO_MANY_REQUESTS,
            };
            refusal_response(status, &wrong)
        }
    }
}
