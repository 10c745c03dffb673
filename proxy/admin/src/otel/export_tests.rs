//! Outcomes of spans: `Retry-After` of a collector is respected, and every lost span is counted.

use std::sync::Mutex;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use warden_policies::defaults;
use warden_supervisor::RemoteOrigin;

use super::*;

/// A collector with scripted answers, which records the time of each request. After the last answer it
/// stays silent.
struct Told {
    url: String,
    came: Arc<Mutex<Vec<Instant>>>,
    tasks: TaskTracker,
}

async fn collector(answers: &[&'static str]) -> Told {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (came, tasks) = (Arc::<Mutex<Vec<Instant>>>::default(), TaskTracker::new());
    let (noted, answers) = (came.clone(), answers.to_vec());
    tasks.spawn(async move {
        for n in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut read = [0; 1024];
            assert!(stream.read(&mut read).await.unwrap() > 0);
            noted.lock().unwrap().push(Instant::now());
            match answers.get(n) {
                Some(answer) => stream.write_all(answer.as_bytes()).await.unwrap(),
                None => std::future::pending().await,
            }
        }
    });
    Told { url, came, tasks }
}

impl Told {
    fn exporter(
        &self,
        numbers: impl FnOnce(&mut defaults::Telemetry),
    ) -> (mpsc::Sender<Vec<OtlpSpan>>, SpanExporter, Arc<MetricsRegistry>) {
        let mut all = defaults().telemetry.clone();
        all.interval = Duration::ZERO;
        all.batch = 2;
        numbers(&mut all);
        let collector = TraceCollector {
            origin: RemoteOrigin::parse(&self.url, None).unwrap(),
            path: "/v1/traces".to_owned(),
            headers: http::HeaderMap::new(),
            resource: Vec::new(),
            numbers: all,
        };
        let (queue, waiting) = mpsc::channel(16);
        let metrics = Arc::new(MetricsRegistry::new());
        let exporter = SpanExporter::new(collector, waiting, metrics.clone());
        (queue, exporter, metrics)
    }

    async fn until(&self, requests: usize) {
        let until = Instant::now() + Duration::from_secs(20);
        while self.came.lock().unwrap().len() < requests {
            assert!(Instant::now() < until, "never: {requests} requests");
            sleep(Duration::from_millis(2)).await;
        }
    }
}

fn spans(count: usize) -> Vec<OtlpSpan> {
    vec![OtlpSpan::default(); count]
}

#[tokio::test]
async fn a_collector_that_names_a_time_is_left_alone_until_then_though_spans_are_dropped() {
    const BUSY: &str =
        "HTTP/1.1 503 Busy\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    const TAKEN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    // The collector requests a wait longer than any own pause, and longer than a batch is kept.
    let told = collector(&[BUSY, TAKEN]).await;
    let (queue, exporter, metrics) = told.exporter(|numbers| {
        numbers.retry_pause_cap = Duration::from_millis(10);
        numbers.retry_for = Duration::from_millis(50);
    });
    let (running, stop) = (TaskTracker::new(), CancellationToken::new());
    running.spawn(exporter.run(stop.clone()));
    queue.send(spans(2)).await.unwrap();
    told.until(1).await;
    queue.send(spans(2)).await.unwrap();
    told.until(2).await;
    let came = told.came.lock().unwrap().clone();
    // `Retry-After` is in whole seconds; the limit has 10 ms of tolerance.
    assert!(came[1] - came[0] >= Duration::from_millis(1990), "{:?}", came[1] - came[0]);
    drop(queue);
    running.close();
    running.wait().await;
    assert_eq!(metrics.span_count(SpanOutcome::Undelivered), 2);
    assert_eq!(metrics.span_count(SpanOutcome::Exported), 2);
    drop(told.tasks);
}

#[tokio::test]
async fn what_could_not_be_sent_at_the_end_is_counted() {
    let told = collector(&[]).await;
    let (queue, exporter, metrics) = told.exporter(|numbers| numbers.flush = Duration::from_millis(100));
    let (running, stop) = (TaskTracker::new(), CancellationToken::new());
    running.spawn(exporter.run(stop.clone()));
    // A batch is being sent to a collector that does not answer, and two more wait.
    queue.send(spans(2)).await.unwrap();
    told.until(1).await;
    queue.send(spans(3)).await.unwrap();
    queue.send(spans(4)).await.unwrap();
    stop.cancel();
    running.close();
    running.wait().await;
    assert_eq!(metrics.span_count(SpanOutcome::Undelivered), 9);
    assert!(queue.try_reserve().is_err(), "whoever comes now counts by itself");
}

#[tokio::test]
async fn at_the_end_a_collector_that_wants_to_be_left_alone_is() {
    const BUSY: &str =
        "HTTP/1.1 429 Busy\r\nRetry-After: 30\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let told = collector(&[BUSY]).await;
    let (queue, exporter, metrics) = told.exporter(|_| {});
    let (running, stop) = (TaskTracker::new(), CancellationToken::new());
    running.spawn(exporter.run(stop.clone()));
    queue.send(spans(2)).await.unwrap();
    queue.send(spans(2)).await.unwrap();
    told.until(1).await;
    stop.cancel();
    running.close();
    running.wait().await;
    assert_eq!(told.came.lock().unwrap().len(), 1);
    assert_eq!(metrics.span_count(SpanOutcome::Undelivered), 4);
}
