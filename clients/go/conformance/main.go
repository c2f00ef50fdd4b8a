// Command conformance plays requests of clients/conformance with the Go client: one JSON object per line, in and out.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

const shown = 10_000

type answer = map[string]any

type request struct {
	ID      int             `json:"id"`
	Do      string          `json:"do"`
	Server  json.RawMessage `json:"server"`
	Prompt  prompt          `json:"prompt"`
	Options options         `json:"options"`

	Delivery        delivery `json:"delivery"`
	Model           string   `json:"model"`
	RequestID       string   `json:"request_id"`
	GenerationID    string   `json:"generation_id"`
	AfterSequence   string   `json:"after_sequence"`
	TimeoutSeconds  float64  `json:"timeout_seconds"`
	PauseSeconds    float64  `json:"pause_seconds"`
	End             *end     `json:"end"`
	MarkAfterChunks *int     `json:"mark_after_chunks"`
	Service         string   `json:"service"`
	Count           int      `json:"count"`
	Streams         int      `json:"streams"`
}

type end struct {
	After   string  `json:"after"`
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
	By      string  `json:"by"`
}

type server struct {
	Target  string    `json:"target"`
	Targets []string  `json:"targets"`
	Token   string    `json:"token"`
	TLS     *tlsFiles `json:"tls"`
}

type tlsFiles struct {
	CAFile          string `json:"ca_file"`
	CertificateFile string `json:"certificate_file"`
	KeyFile         string `json:"key_file"`
}

func (f *tlsFiles) config() (*tls.Config, error) {
	authority, err := os.ReadFile(f.CAFile)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(authority)
	if f.CertificateFile != "" {
		pair, err := tls.LoadX509KeyPair(f.CertificateFile, f.KeyFile)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// program answers requests side by side. Requests with equal servers share one client.
type program struct {
	mu      sync.Mutex
	clients map[string]*mlxstream.Client
	out     sync.Mutex
}

func main() {
	p := &program{clients: map[string]*mlxstream.Client{}}
	var running sync.WaitGroup
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 1 {
			running.Add(1)
			go func() {
				defer running.Done()
				p.answer(line)
			}()
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	running.Wait()
	for _, client := range p.clients {
		client.Close()
	}
}

func (p *program) answer(line []byte) {
	var r request
	if err := json.Unmarshal(line, &r); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	client, err := p.client(r.Server)
	if err == nil {
		var told answer
		if told, err = p.play(client, r); err == nil {
			p.say(r.ID, told)
			return
		}
	}
	p.say(r.ID, answer{"outcome": "failed", "error": tell(err)})
}

func (p *program) play(client *mlxstream.Client, r request) (answer, error) {
	ctx, cancel := r.context()
	defer cancel()
	switch r.Do {
	case "stream":
		return p.stream(ctx, cancel, r, client.Stream(ctx, r.built())), nil
	case "resume":
		var after uint64
		if _, err := fmt.Sscan(r.AfterSequence, &after); err != nil {
			return nil, err
		}
		return p.stream(ctx, cancel, r, client.Resume(ctx, r.GenerationID, after)), nil
	case "generate":
		return generate(ctx, client, r)
	case "burst":
		return burst(ctx, client, r), nil
	case "abort":
		return abort(ctx, client, r)
	case "health":
		status, err := client.Health(ctx, r.Service)
		return answer{"outcome": "ok", "status": status}, err
	case "watch":
		return p.watch(ctx, client, r)
	case "model":
		told, err := client.Models().GetModel(ctx, &v1.GetModelRequest{})
		return answer{"outcome": "ok", "model": told.GetModel().GetName()}, err
	case "load":
		load, err := client.Admin().GetLoad(ctx, &v1.GetLoadRequest{})
		return answer{"outcome": "ok", "queue_limit": load.GetQueueLimit()}, err
	case "drain":
		drained, err := client.Admin().Drain(ctx, &v1.DrainRequest{})
		return answer{"outcome": "ok", "finished": drained.GetFinishedGenerations(),
			"aborted": drained.GetAbortedGenerations()}, err
	case "close":
		p.forget(r.Server)
		return answer{"outcome": "ok"}, client.Close()
	}
	return nil, fmt.Errorf("cannot %q", r.Do)
}

func (r request) context() (context.Context, context.CancelFunc) {
	if r.TimeoutSeconds > 0 {
		return context.WithTimeout(context.Background(), seconds(r.TimeoutSeconds))
	}
	return context.WithCancel(context.Background())
}

func (p *program) client(described json.RawMessage) (*mlxstream.Client, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if client, known := p.clients[string(described)]; known {
		return client, nil
	}
	var s server
	if err := json.Unmarshal(described, &s); err != nil {
		return nil, err
	}
	var chosen []grpc.DialOption
	if s.TLS != nil {
		config, err := s.TLS.config()
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	if s.Token != "" {
		chosen = append(chosen, grpc.WithPerRPCCredentials(mlxstream.Token(s.Token)))
	}
	target := s.Target
	if len(s.Targets) > 0 {
		target = strings.Join(s.Targets, ",")
	}
	client, err := mlxstream.Connect(target, chosen...)
	if err == nil {
		p.clients[string(described)] = client
	}
	return client, err
}

// forget lets the next request of a server connect anew.
func (p *program) forget(described json.RawMessage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.clients, string(described))
}

func (p *program) watch(ctx context.Context, client *mlxstream.Client, r request) (answer, error) {
	var statuses []string
	for status, err := range client.WatchHealth(ctx, r.Service) {
		if err != nil {
			return nil, err
		}
		if statuses = append(statuses, status); len(statuses) == 1 {
			p.say(r.ID, answer{"mark": "status"})
		}
		if len(statuses) == r.Count {
			break
		}
	}
	return answer{"outcome": "ok", "statuses": statuses}, nil
}

func abort(ctx context.Context, client *mlxstream.Client, r request) (answer, error) {
	end, name := client.Abort, r.RequestID
	if r.GenerationID != "" {
		end, name = client.AbortGeneration, r.GenerationID
	}
	ended, err := end(ctx, name)
	if err != nil {
		return nil, err
	}
	return answer{"outcome": "ok", "status": strings.TrimPrefix(ended.GetStatus().String(), "ABORT_STATUS_")}, nil
}

func (p *program) say(id int, told answer) {
	told["id"] = id
	line, err := json.Marshal(told)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	p.out.Lock()
	defer p.out.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

func seconds(count float64) time.Duration { return time.Duration(count * float64(time.Second)) }
